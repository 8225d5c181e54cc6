"""The catalogue: every card is plausible, and is found by the names that people write."""

import pickle
import re

import pytest

from tightfit.devices.catalogue import all_devices, find, words
from tightfit.devices.device import Device
from tightfit.errors import UnknownDevice

CARDS = all_devices()
NAMES = [card.name for card in CARDS]


def test_has_at_least_forty_cards_with_names_of_their_own() -> None:
    assert len(CARDS) >= 40
    assert len(set(NAMES)) == len(NAMES)


def test_no_two_cards_claim_the_same_name() -> None:
    claims = [words(name) for card in CARDS for name in {*card.aliases, card.name}]
    taken = [(card.name, words(name)) for card in CARDS for name in (card.name, *card.aliases)]
    owners: dict[frozenset[str], set[str]] = {}
    for owner, claim in taken:
        owners.setdefault(claim, set()).add(owner)
    assert claims
    assert {claim: found for claim, found in owners.items() if len(found) > 1} == {}


@pytest.mark.parametrize("card", CARDS, ids=NAMES)
def test_a_card_is_found_by_its_name_and_aliases(card: Device) -> None:
    for name in (card.name, card.name.lower(), *card.aliases):
        assert find(name) is card


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("RTX 4090 Laptop", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("NVIDIA GeForce RTX 4060", "NVIDIA GeForce RTX 4060"),
        ("GeForce RTX 4060 Ti 16GB", "NVIDIA GeForce RTX 4060 Ti 16GB"),
        ("4060 ti", "NVIDIA GeForce RTX 4060 Ti"),
        ("3060 12gb", "NVIDIA GeForce RTX 3060"),
        ("3080", "NVIDIA GeForce RTX 3080"),
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("A100 80 GB", "NVIDIA A100-SXM4-80GB"),
        ("A100 40GB", "NVIDIA A100-SXM4-40GB"),
        ("a100 pcie 40g", "NVIDIA A100-PCIE-40GB"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("h100 sxm", "NVIDIA H100 80GB HBM3"),
        ("h100-pcie", "NVIDIA H100 PCIe"),
        ("H100 NVL", "NVIDIA H100 NVL"),
        ("v100", "Tesla V100-SXM2-16GB"),
        ("v100 32gb", "Tesla V100-SXM2-32GB"),
        ("Tesla T4", "Tesla T4"),
        ("A10", "NVIDIA A10"),
        ("a10g", "NVIDIA A10G"),
        ("L4", "NVIDIA L4"),
        ("rtx 6000 ada", "NVIDIA RTX 6000 Ada Generation"),
        ("rtx a6000", "NVIDIA RTX A6000"),
        ("rtx pro 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("mi300x", "AMD Instinct MI300X"),
    ],
)
def test_names_as_people_write_them(query: str, name: str) -> None:
    assert find(query).name == name


@pytest.mark.parametrize(
    "query",
    [
        "",
        "rtx",
        "nvidia",
        "4091",
        "A100 24GB",
        "quantum 9000",
        "3080 12GB",
        "3060 8GB",
        "4060 16GB",
        "1080",
        "4090,3090",
    ],
)
def test_an_unknown_name_is_refused_in_one_line(query: str) -> None:
    with pytest.raises(UnknownDevice) as caught:
        find(query)
    assert f"'{query}'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "nearest"),
    [
        ("RTX 4061", "NVIDIA GeForce RTX 4060, NVIDIA GeForce RTX 4060 Ti"),
        ("rtx 4091", "NVIDIA GeForce RTX 4090"),
        ("a101", "NVIDIA A100-SXM4-80GB"),
        ("h1000", "NVIDIA H100 80GB HBM3"),
        ("4090 ti", "NVIDIA GeForce RTX 4090"),
        ("mi301", "AMD Instinct MI300X"),
        ("RTX A600", "NVIDIA RTX A6000"),
        ("T5", "Tesla T4"),
        ("RTX 4O60", "NVIDIA GeForce RTX 4060, NVIDIA GeForce RTX 4060 Ti"),
        ("4O90", "NVIDIA GeForce RTX 4090"),
        ("A10O", "NVIDIA A100-SXM4-80GB"),
        ("h1oo", "NVIDIA H100 80GB HBM3"),
        ("RTX 5O9O", "NVIDIA GeForce RTX 5090"),
    ],
)
def test_an_unknown_name_lists_the_nearest_first(query: str, nearest: str) -> None:
    with pytest.raises(UnknownDevice, match=f"the nearest are {re.escape(nearest)}"):
        find(query)


def test_a_size_alone_names_no_gpu() -> None:
    with pytest.raises(UnknownDevice, match=r"no GPU is called '24GB'; name one: .* have that much memory, such as "):
        find("24GB")


@pytest.mark.parametrize("query", ["cuda", "cuda:0", "GPU", "cpu", "0", ""])
def test_a_device_of_torch_is_not_the_name_of_a_card(query: str) -> None:
    with pytest.raises(UnknownDevice, match="leave --device out for the GPU of this machine"):
        find(query)


@pytest.mark.parametrize("query", ["banana", "geforce"])
def test_a_name_that_is_like_none_gets_no_list(query: str) -> None:
    with pytest.raises(UnknownDevice, match="nothing is near to it"):
        find(query)


def test_a_device_is_plain_data() -> None:
    card = find("4090")
    assert pickle.loads(pickle.dumps(card)) == card
    assert {card: 1}[card] == 1
