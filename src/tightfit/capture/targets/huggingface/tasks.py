"""Training tasks of Hugging Face models: the tasks by name, and the default one of a config.

A task is an auto class of transformers together with the kind of labels that its models take. The order of the
table is the priority of tasks for a model type that serves several: BERT is in the causal table too, yet without
a task masked language modelling is meant.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, Literal

from tightfit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

LabelKind = Literal["tokens", "classes", "token_classes", "spans", "choices", "pixels", "boxes", "patches", "pairs", ""]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One way to train a model: `auto_class` builds it, `mapping` names the model types that have it.

    The names of the mappings are those of transformers/models/auto/modeling_auto.py, without `MODEL_` and
    `_MAPPING_NAMES`.
    """

    auto_class: str
    mapping: str
    labels: LabelKind


TASKS: Mapping[str, Task] = {
    "image-text": Task(auto_class="AutoModelForImageTextToText", mapping="FOR_IMAGE_TEXT_TO_TEXT", labels="tokens"),
    "speech-seq2seq": Task(auto_class="AutoModelForSpeechSeq2Seq", mapping="FOR_SPEECH_SEQ_2_SEQ", labels="tokens"),
    "ctc": Task(auto_class="AutoModelForCTC", mapping="FOR_CTC", labels="tokens"),
    "contrastive": Task(
        auto_class="AutoModelForZeroShotImageClassification",
        mapping="FOR_ZERO_SHOT_IMAGE_CLASSIFICATION",
        labels="pairs",
    ),
    "seq2seq": Task(auto_class="AutoModelForSeq2SeqLM", mapping="FOR_SEQ_TO_SEQ_CAUSAL_LM", labels="tokens"),
    "masked-lm": Task(auto_class="AutoModelForMaskedLM", mapping="FOR_MASKED_LM", labels="tokens"),
    "causal-lm": Task(auto_class="AutoModelForCausalLM", mapping="FOR_CAUSAL_LM", labels="tokens"),
    "image-classification": Task(
        auto_class="AutoModelForImageClassification", mapping="FOR_IMAGE_CLASSIFICATION", labels="classes"
    ),
    "video-classification": Task(
        auto_class="AutoModelForVideoClassification", mapping="FOR_VIDEO_CLASSIFICATION", labels="classes"
    ),
    "audio-classification": Task(
        auto_class="AutoModelForAudioClassification", mapping="FOR_AUDIO_CLASSIFICATION", labels="classes"
    ),
    "semantic-segmentation": Task(
        auto_class="AutoModelForSemanticSegmentation", mapping="FOR_SEMANTIC_SEGMENTATION", labels="pixels"
    ),
    "object-detection": Task(auto_class="AutoModelForObjectDetection", mapping="FOR_OBJECT_DETECTION", labels="boxes"),
    "sequence-classification": Task(
        auto_class="AutoModelForSequenceClassification", mapping="FOR_SEQUENCE_CLASSIFICATION", labels="classes"
    ),
    "token-classification": Task(
        auto_class="AutoModelForTokenClassification", mapping="FOR_TOKEN_CLASSIFICATION", labels="token_classes"
    ),
    "question-answering": Task(
        auto_class="AutoModelForQuestionAnswering", mapping="FOR_QUESTION_ANSWERING", labels="spans"
    ),
    "multiple-choice": Task(auto_class="AutoModelForMultipleChoice", mapping="FOR_MULTIPLE_CHOICE", labels="choices"),
    "masked-image": Task(
        auto_class="AutoModelForMaskedImageModeling", mapping="FOR_MASKED_IMAGE_MODELING", labels="patches"
    ),
    "pretraining": Task(auto_class="AutoModelForPreTraining", mapping="FOR_PRETRAINING", labels=""),
    "features": Task(auto_class="AutoModel", mapping="", labels=""),
}
"""`features` is the bare model, trained on the mean of its first output: it serves every model type."""


def choose(config: Any, name: str | None) -> tuple[str, Task]:
    """The task called `name`, or the one that the config means: by its `architectures`, else by its model type.

    Raises:
        UsageError: there is no such task, or models of this type do not have it.
    """
    served = [task_name for task_name, task in TASKS.items() if config.model_type in _classes(task)]
    if name is None:
        names = getattr(config, "architectures", None) or ()
        meant = [task_name for task_name in served if _serves(TASKS[task_name], config.model_type, names)]
        name = next(iter(meant or served))
    if name not in TASKS:
        raise UsageError(f"no task {name!r}; the tasks are {', '.join(TASKS)}")
    if name not in served:
        raise UsageError(f"a {config.model_type} model has no task {name!r}; it has {', '.join(served)}")
    return name, TASKS[name]


def _classes(task: Task) -> Mapping[str, str | tuple[str, ...]]:
    """Model type to class name(s), as transformers has them."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    # The bare model's table is MODEL_MAPPING_NAMES, without a task in its name.
    infix = f"{task.mapping}_" if task.mapping else ""
    return getattr(auto, f"MODEL_{infix}MAPPING_NAMES", {})


def _serves(task: Task, model_type: str, architectures: tuple[str, ...]) -> bool:
    classes = _classes(task)[model_type]
    return any(name in ((classes,) if isinstance(classes, str) else classes) for name in architectures)
