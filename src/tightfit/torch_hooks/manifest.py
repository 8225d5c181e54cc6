"""Every name of torch and of other libraries that tightfit replaces in a user's process, and every private one that it reads there.

None of them is promised by its library. `check` looks for those of torch before anything is imported that uses them. A name that the installed
library lacks is an error that says so: never a patch that is put somewhere and not called, nor one that is left out without a word. What the
capture uses in its own child process is in `tightfit.capture.patches.manifest`, and so is what both use.
"""

from functools import cache

from tightfit.capture.patches.manifest import (
    GRAPH_TASK_ID,
    IN_BOTH,
    MODULE_APPLY,
    NUM_DISPATCH_MODES,
    RUN_BACKWARD,
    SET_VERSIONS,
    STORAGE_USES,
    Symbol,
)
from tightfit.errors.private_names import FIRST_TORCH, Name, known, operators, require

OPTIMIZER_INIT = known(
    "torch.optim.optimizer:Optimizer.__init__", "to apply a plan to the optimizers of a script", "torch_hooks"
)
REDUCER_INIT = known(
    "torch.nn.parallel.distributed:DistributedDataParallel.__init__",
    "to tell whose gradients are averaged over processes as they arrive",
    "torch_hooks",
)
MODULE_CALL = known(
    "torch.nn.modules.module:Module.__call__", "to apply a plan to the models of a script", "torch_hooks"
)
LOADER_ITER = known(
    "torch.utils.data.dataloader:DataLoader.__iter__",
    "to take a step back that begins to read a data set anew",
    "torch_hooks",
)
LOADER_NEXT = known(
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",
    "to know which steps have asked a data loader for a batch",
    "torch_hooks",
)
LIGHTNING_STEP = known(
    "lightning.pytorch.strategies.strategy:Strategy.training_step",
    "to apply a plan to a LightningModule's training step",
    "runtime",
    first="2.6",
    last="2.6",
    is_checked=False,
)
PYTORCH_LIGHTNING_STEP = known(
    "pytorch_lightning.strategies.strategy:Strategy.training_step",
    "to apply a plan to a LightningModule's training step",
    "runtime",
    first="2.6",
    last="2.6",
    is_checked=False,
)
LIGHTNING_CLOSURE = known(
    "lightning.pytorch.loops.optimization.automatic:Closure.closure",
    "to guard the passes for a batch in Lightning",
    "guarding integrations",
    first="2.6",
    last="2.6",
    is_checked=False,
)
TRAINER_STEP = known(
    "transformers.trainer:Trainer.training_step",
    "to apply a plan to a Trainer's training step, and to guard it",
    "runtime guarding integrations",
    first="4.51",
    last="5.23",
    is_checked=False,
)
GENERATE = known(
    "transformers.generation.utils:GenerationMixin.generate",
    "to compare what generate makes with another cache",
    "torch_hooks",
    first="5.0",
    last="5.23",
    is_checked=False,
)
PREPARE_CACHE = known(
    "transformers.generation.utils:GenerationMixin._prepare_cache_for_generation",
    "to give generate another cache",
    "torch_hooks",
    first="5.0",
    last="5.23",
    is_checked=False,
)
CUDA_IS_AVAILABLE = known(
    "torch.cuda:is_available", "to import a library of kernels beside a virtual card", "torch_hooks"
)
ACCUMULATE_GRAD = known(
    "torch._C:_functions.AccumulateGrad", "to tell the leaves of a graph from its other nodes", "torch_hooks"
)
TENSOR_USES = known(
    "torch:Tensor._use_count", "to tell whether a gradient was exported without a copy", "engine techniques"
)
NOT_TRACED = known(
    "torch._dynamo.exc:Unsupported",
    "to have the compiler leave code to Python that reads gradients which are not kept",
    "techniques",
    is_checked=False,
)
SKIP_CODE = known(
    "torch._dynamo.eval_frame:skip_code",
    "to keep the compiler from what stand-ins for tensors run in code that it has left to Python",
    "techniques",
    is_checked=False,
)
KEEPS_GRAPH = known(
    "torch._C._autograd:_get_current_graph_task_keep_graph",
    "to tell whether a graph may be gone through once more",
    "torch_hooks",
)
NODE_HOOK = known(
    "torch.autograd.function:_HookMixin._register_hook",
    "to tell which graphs have hooks on their nodes, before one is run twice or in parts",
    "torch_hooks",
)
TENSOR_HOOK = known(
    "torch:Tensor.register_hook",
    "to tell which tensors of a graph are hooked, before its backward pass is run twice",
    "torch_hooks",
)
RETAIN_GRAD = known(
    "torch:Tensor.retain_grad",
    "to tell which tensors of a graph are hooked, before its backward pass is run twice",
    "torch_hooks",
)
SET_ATTRIBUTE = known(
    "torch:Tensor.__setattr__",
    "to tell before the data of a tensor is set to that of one that has no memory",
    "torch_hooks",
)
SWAP_TENSORS = known(
    "torch.utils:swap_tensors", "to tell before a streamed weight is exchanged for another tensor", "torch_hooks"
)
_OF_BATCHES = "to copy batches to the card without waiting for it"
TENSOR_TO = known("torch:Tensor.to", _OF_BATCHES, "torch_hooks")
TENSOR_CUDA = known("torch:Tensor.cuda", _OF_BATCHES, "torch_hooks")
TENSOR_COPY = known("torch:Tensor.copy_", _OF_BATCHES, "torch_hooks")
NEGATED_VIEW = known("torch:_neg_view", "to give back a lazily negated view of a streamed weight", "engine")
_SAVED = "to find what a graph has saved and the program may write to, before the graph is run twice"
# Properties of saved tensors since then (torch/csrc/autograd/init.cpp).
_READ_IN_MEMORY = "both are read where C++ has them (torch_hooks/saved_variables.py)"
SAVED_DATA = known(
    "torch._C._autograd:SavedTensor.data",
    f"{_SAVED}, and what a kept graph retains",
    "torch_hooks",
    first="2.10",
    before=_READ_IN_MEMORY,
)
WRAP_TENSOR = Symbol(
    library="torch_python",
    name="_Z16THPVariable_WrapRKN2at10TensorBaseE",
    purpose="to have the tensor that a graph has saved",
    first=FIRST_TORCH,
    last="2.9",
)
# What comes before the name of a derivative formula's input in a node's attribute (tools/autograd/gen_autograd_functions.py).
SAVED_PREFIX = "_raw_saved_"
RAW_SAVED_TENSORS = known(
    "torch._C:_FunctionBase._raw_saved_tensors", "to tell which function has tensors saved", "torch_hooks"
)
SAVE_FOR_BACKWARD = known(
    "torch.autograd.function:FunctionCtx.save_for_backward",
    "to tell which function has tensors saved, when hooks for saved tensors are called",
    "torch_hooks",
)
SAVED_HOOK = known(
    "torch._C._autograd:SavedTensor.unpack_hook", _SAVED, "torch_hooks", first="2.10", before=_READ_IN_MEMORY
)
MAKE_SAVED_TENSOR = known(
    "torch._C._autograd:_make_saved_tensor",
    "to have autograd save the arguments of a recomputed block",
    "techniques",
    first="2.12",
    before="a checkpoint has a function save them, which takes ten times as long",
)
_OF_KEPT = "to share versions with a result that a selective checkpoint keeps"
INCLUDES_KEY = known("torch._C:_SetExcludeDispatchKeyGuard", _OF_KEPT, "techniques")
KEY_OF_VERSIONS = known("torch._C:DispatchKey.ADInplaceOrView", _OF_KEPT, "techniques")

_OF_SELECTION = "to run operators of our own outside of a selective checkpoint"
DISPATCH_MODE = known("torch.utils._python_dispatch:_get_current_dispatch_mode", _OF_SELECTION, "torch_hooks")
POP_DISPATCH_MODE = known("torch.utils._python_dispatch:_pop_mode", _OF_SELECTION, "torch_hooks")
PUSH_DISPATCH_MODE = known("torch.utils._python_dispatch:_push_mode", _OF_SELECTION, "torch_hooks")

REPLACED = (
    RUN_BACKWARD,
    OPTIMIZER_INIT,
    REDUCER_INIT,
    MODULE_CALL,
    MODULE_APPLY,
    LOADER_ITER,
    LOADER_NEXT,
    LIGHTNING_STEP,
    PYTORCH_LIGHTNING_STEP,
    LIGHTNING_CLOSURE,
    TRAINER_STEP,
    CUDA_IS_AVAILABLE,
    TENSOR_HOOK,
    RETAIN_GRAD,
    SET_ATTRIBUTE,
    SWAP_TENSORS,
    TENSOR_TO,
    TENSOR_CUDA,
    TENSOR_COPY,
    GENERATE,
    PREPARE_CACHE,
    NODE_HOOK,
    SAVE_FOR_BACKWARD,
)
READ = (
    NEGATED_VIEW,
    ACCUMULATE_GRAD,
    GRAPH_TASK_ID,
    KEEPS_GRAPH,
    DISPATCH_MODE,
    INCLUDES_KEY,
    KEY_OF_VERSIONS,
    MAKE_SAVED_TENSOR,
    POP_DISPATCH_MODE,
    PUSH_DISPATCH_MODE,
    RAW_SAVED_TENSORS,
    SAVED_DATA,
    SAVED_HOOK,
    SET_VERSIONS,
    STORAGE_USES,
    TENSOR_USES,
    NOT_TRACED,
    SKIP_CODE,
    NUM_DISPATCH_MODES,
)

_BY_TIME = "events of the allocator are matched with notes by their times, in microseconds"
GET_STAMP = known(
    "torch.cuda.memory:_get_memory_metadata",
    "to leave as it was what is stamped on events of the allocator",
    "runtime",
    first="2.10",
    before=_BY_TIME,
)
SET_STAMP = known(
    "torch.cuda.memory:_set_memory_metadata",
    "to stamp events of the allocator",
    "runtime",
    first="2.10",
    before=_BY_TIME,
)

IN_USERS_PROCESS: tuple[Name, ...] = (
    *(name for name in (*REPLACED, *READ) if name not in IN_BOTH),
    # Tensors among arguments.
    known("torch.utils._pytree:keystr", "to name tensors among arguments", "runtime"),
    known("torch.utils._pytree:tree_flatten_with_path", "to name tensors among arguments", "runtime"),
    # Tensors without data, modes and operators.
    known(
        "torch._C:DisableTorchFunctionSubclass",
        "to run operators on lazy tensors, and to look at tensors of a program's own classes",
        "runtime techniques",
    ),
    known("torch:Tensor._base", "to tell what a saved view is of, and what a view keeps", "engine techniques"),
    # Autograd.
    known("torch._C._functorch:is_batchedtensor", "to refuse backward passes for many gradients at once", "techniques"),
    known(
        "torch._C._functorch:is_legacy_batchedtensor",
        "to refuse backward passes for many gradients at once",
        "techniques",
    ),
    known(
        "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
        "to apply a plan outside of the transforms of torch.func",
        "runtime",
    ),
    known("torch._C:_are_functorch_transforms_active", "to refuse what torch.func transforms would see", "techniques"),
    known(
        "torch.autograd.forward_ad:_current_level", "to refuse what forward-mode derivatives would see", "techniques"
    ),
    known(
        "torch.utils.checkpoint:_StopRecomputationError",
        "to tell a recomputation that ended early from an error",
        "techniques",
    ),
    known(
        "torch.autograd:Variable._execution_engine.queue_callback",
        "to drop weights at the end of a backward pass",
        "techniques",
    ),
    # Tensors and storages.
    known("torch:_disable_dynamo", "to keep the compiler out of code of ours, without importing it", "techniques"),
    known("torch:_foreach_mul_", "to scale gradients in few kernels", "techniques"),
    # Hooks and parts of modules, tensors and optimizers.
    known("torch.nn.modules.batchnorm:_BatchNorm", "to tell batch norms", "techniques"),
    known("torch.nn.modules.conv:_ConvNd", "to tell convolutions", "techniques"),
    known("torch.nn:Conv2d._conv_forward", "to see whether a script has put its own there", "techniques"),
    known("torch.nn.modules.dropout:_DropoutNd", "to tell dropouts", "techniques"),
    known("torch.nn:Module._compiled_call_impl", "to see whether a module was compiled in place", "techniques"),
    # The card: context, allocator, compiler.
    GET_STAMP,
    SET_STAMP,
    known("torch.cuda.memory:_snapshot", "to read what was recorded of the allocator", "runtime"),
    # Operators.
    *operators("techniques", "_foreach_div_ _foreach_mul_ _foreach_zero_"),
)
"""What a user's process uses besides what it shares with the child (`IN_BOTH`)."""


@cache
def check() -> None:
    """Looks for all names of torch that a user's process uses, those shared with the child too; once in a process.

    Raises:
        UnsupportedTorch: the installed torch lacks some.
        ModuleNotFoundError: there is no torch.
    """
    require((*IN_BOTH, *IN_USERS_PROCESS))
