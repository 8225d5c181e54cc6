"""The training scripts that tightfit has to estimate unmodified are valid programs.

Each one is run as a user would run it, in a process (forked with torch and transformers imported) and a directory of its own, on the CPU and with small
arguments. It has to end by itself, to print at least one loss, and all the losses it prints have to be finite.
"""

import math
import re
from pathlib import Path

import pytest
from tests.forked_python import Finished, forked_python

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
SECONDS_PER_SCRIPT = 120

# The number after the word, however the script decorates it: "loss 1.2", "'eval_loss': '1.2'", "Loss_D: 1.2", "train_loss_step=1.2".
LOSS = re.compile(r"loss\w*['\"]?\s*[:=]?\s*['\"]?(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|-?inf)\b", re.IGNORECASE)

SMALL_ARGUMENTS = {
    "accelerate_glue.py": "--vocab_size 400 --hidden_size 32 --num_hidden_layers 2 --num_attention_heads 2 --max_length 24 "
    "--num_train_samples 32 --num_eval_samples 12 --batch_size 8 --eval_batch_size 8 --num_epochs 2 --output_dir glue",
    "accumulation_ema.py": "--image_size 32 --patch_size 8 --dim 32 --depth 2 --num_images 64 --batch_size 8 "
    "--accumulation_steps 3 --epochs 2",
    "clip_two_tower.py": "--batch-size 8 --num-samples 24 --image-size 32 --vision-width 8 --embed-dim 16 --vocab-size 200 "
    "--context-length 12 --text-width 16 --text-layers 1 --text-heads 2",
    "detection.py": "--image-size 64 --width 16 --num-images 16 --batch-size 4 --print-freq 1",
    "diffusion_unet.py": "--resolution 16 --block_out_channels 8 16 --layers_per_block 1 --norm_num_groups 4 --num_images 16 "
    "--train_batch_size 8 --num_epochs 1 --num_inference_steps 3",
    "gan.py": "--batchSize 8 --numImages 16 --nz 8 --ngf 4 --ndf 4 --niter 1 --manualSeed 1",
    "lightning_mnist.py": "--batch_size 16 --channels 4 --num_samples 96 --max_epochs 1 --save_path last.ckpt",
    "manual_sgd.py": "--batch_size 32 --hidden 32 --steps 11",
    "nanogpt_train.py": "--n_layer 2 --n_head 2 --n_embd 32 --vocab_size 512 --block_size 32 --batch_size 4 --max_iters 4 "
    "--eval_interval 2 --eval_iters 2 --gradient_accumulation_steps 2",
    "peft_lora.py": "--hidden_size 32 --intermediate_size 64 --num_hidden_layers 2 --num_attention_heads 4 --num_key_value_heads 2 "
    "--vocab_size 128 --max_seq_length 16 --lora_r 4 --num_samples 16",
    "reinforce.py": "--hidden 16 --episodes 10",
    "run_clm.py": "--model_type llama --num_hidden_layers 2 --hidden_size 32 --num_attention_heads 4 --vocab_size 128 "
    "--block_size 16 --num_train_samples 16 --num_eval_samples 4 --eval_steps 2 --max_steps 3",
    "sampling_rnn.py": "--emsize 16 --nhid 32 --epochs 2 --batch_size 8 --bptt 32 --chars 3000",
    "segmentation_unet.py": "--epochs 1 --batch-size 4 --image-size 32 --num-images 16 --width 8 --depth 2",
    "seq2seq_t5.py": "--d_model 32 --d_ff 64 --num_layers 2 --num_heads 2 --vocab_size 128 --max_source_length 16 "
    "--num_train_samples 16 --num_eval_samples 4 --num_epochs 1 --max_new_tokens 8",
    "vit_amp.py": "--image-size 32 --patch-size 8 --dim 32 --depth 2 --heads 2 --mlp-dim 64 --num-classes 10 --batch-size 8 "
    "--train-images 32 --val-images 16 --epochs 1 --checkpointing",
}


def run(command: list[str], directory: Path) -> Finished:
    """Run a script on the CPU alone, with one thread (the models are tiny) and without the network."""
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return forked_python(*command, cwd=directory, env=quiet, timeout=SECONDS_PER_SCRIPT)


def test_every_script_has_small_arguments_here() -> None:
    assert {path.name for path in SCRIPTS.glob("*.py")} == set(SMALL_ARGUMENTS)


def test_every_script_is_described_in_the_readme() -> None:
    described = set(re.findall(r"`(\w+\.py)`", (SCRIPTS / "README.md").read_text()))
    assert described == set(SMALL_ARGUMENTS)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    "script",
    # It takes longer than all others, and Accelerate is estimated as an example too.
    [
        pytest.param(name, marks=pytest.mark.slow if name == "accelerate_glue.py" else ())
        for name in sorted(SMALL_ARGUMENTS)
    ],
)
def test_the_script_trains_on_the_cpu(script: str, tmp_path: Path) -> None:
    finished = run([str(SCRIPTS / script), *SMALL_ARGUMENTS[script].split()], tmp_path)
    printed = finished.stdout + finished.stderr
    assert finished.returncode == 0, printed[-4000:]
    losses = [float(number) for number in LOSS.findall(finished.stdout)]
    assert losses, f"no loss in what {script} printed:\n{printed[-4000:]}"
    assert all(math.isfinite(loss) for loss in losses), losses


def test_nanogpt_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    command = [str(SCRIPTS / "nanogpt_train.py"), *SMALL_ARGUMENTS["nanogpt_train.py"].split()]
    first = run(command, tmp_path)
    assert "saving checkpoint" in first.stdout, first.stdout + first.stderr
    resumed = run([*command, "--init_from", "resume"], tmp_path)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert "iter 0:" not in resumed.stdout


def test_the_example_explains_its_arguments(tmp_path: Path) -> None:
    finished = run([str(ROOT / "examples" / "train_gpt2.py"), "--help"], tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert {"--batch-size", "--sequence-length", "--steps"} <= set(re.findall(r"--[\w-]+", finished.stdout))
