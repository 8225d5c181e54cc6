"""Every private name of torch, vtable slot and native symbol that the child which traces uses, and those that a user's process uses as well.

None of them is promised by torch. The child looks for them before it imports what uses them (`tightfit.capture.child_process.child`), so that a release which lacks
one is told in one line. `tightfit.torch_hooks.manifest` has those of a user's process alone; tests/surface/test_manifest.py compares both with
the source. Operators are listed where a release without them would stop us; an operator that only names are compared with is not.
"""

import dataclasses

from tightfit.errors.private_names import FIRST_TORCH, LAST_TORCH, Name, known, operators, require


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """A symbol of one of torch's libraries (`lib` in its folder), as its linker has it."""

    library: str
    name: str
    purpose: str
    first: str
    last: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A virtual function of the CUDA hooks that is answered in place of torch: its place in the vtable, and its name in the header."""

    index: int
    function: str
    purpose: str
    first: str
    last: str


GUARD_REGISTRY = Symbol(
    library="c10",
    name="_ZN3c104impl26device_guard_impl_registryE",
    purpose="to register a device guard for cuda in a CPU build",
    first=FIRST_TORCH,
    last=LAST_TORCH,
)
CUDA_HOOKS = Symbol(
    library="torch_cpu",
    name="_ZN2at6detail12getCUDAHooksEv",
    purpose="to have cuda count as an accelerator that is there",
    first=FIRST_TORCH,
    last=LAST_TORCH,
)
# The Itanium C++ ABI gives a virtual destructor the slots 0 and 1.
HOOKS_HEADERS = ("ATen/detail/AcceleratorHooksInterface.h", "ATen/detail/CUDAHooksInterface.h")
SLOTS = (
    Slot(index=2, function="isBuilt", purpose="to say that torch was built with CUDA", first="2.7", last=LAST_TORCH),
    Slot(index=3, function="isAvailable", purpose="to say that there is a card", first="2.7", last=LAST_TORCH),
    Slot(
        index=4,
        function="hasPrimaryContext",
        purpose="to say that the card has a context",
        first="2.7",
        last=LAST_TORCH,
    ),
)
# In 2.6 an accelerator is what has a device (`at::getAccelerator`), and `hasCUDA` the first function after the 13 of all accelerators.
OLDER_SLOTS = (
    Slot(index=2, function="hasPrimaryContext", purpose="to say that the card has a context", first="2.6", last="2.6"),
    Slot(index=14, function="hasCUDA", purpose="to say that there is a card", first="2.6", last="2.6"),
)

# The operator was MPS's own before, with other arguments.
_COMPOSED = "layers normalise by smaller operators there, and no rule is needed"
_GROUPED = operators(
    "capture/dispatch",
    "_grouped_mm _scaled_grouped_mm",
    first="2.8",
    before="no program can call it, and no rule is needed",
)
_RMS_NORM = operators("capture/kernels", "_fused_rms_norm _fused_rms_norm_backward", first="2.9", before=_COMPOSED)
WRAP_COLLECTIVE = known(
    "torch:ops._c10d_functional._wrap_tensor_autograd",
    "to follow collectives",
    "capture/collectives",
    first="2.10",
    is_checked=False,
    before="torch makes the wrapper in Python, which needs no rule",
)
ENSURE_GUARD = known(
    "torch._C:_ensureCUDADeviceGuardSet",
    "to have torch's no-op guard installed for cuda",
    "capture/patches",
    first="2.10",
    before="a guard of our own is put into the registry",
)

LOADER_ITERATOR = known(
    "torch.utils.data.dataloader:_BaseDataLoaderIter", "to see which batches are taken", "capture/patches torch_hooks"
)
NUM_DISPATCH_MODES = known(
    "torch._C:_len_torch_dispatch_stack",
    "to leave a dispatch mode only where it is the innermost, and to see those of the program",
    "capture/steps guarding techniques",
)
_ASK_FOR_HOOKS = "to leave alone what is saved where the program has hooks of its own"
TOP_SAVED_HOOKS = known(
    "torch._C._autograd:_top_saved_tensors_default_hooks",
    _ASK_FOR_HOOKS,
    "effects",
    first="2.8",
    before="they are read where C++ has them",
)
STACK_OF_HOOKS = Symbol(
    library="torch_cpu",
    name="_ZN2at23SavedTensorDefaultHooks13get_tls_stateEv",
    purpose=_ASK_FOR_HOOKS,
    first=FIRST_TORCH,
    last="2.7",
)
FETCHER, MAP_FETCHER, ITERABLE_FETCHER = (
    known(path, "to tell how long loading a batch takes", "capture/patches")
    for path in (
        "torch.utils.data._utils.fetch:_BaseDatasetFetcher",
        "torch.utils.data._utils.fetch:_MapDatasetFetcher",
        "torch.utils.data._utils.fetch:_IterableDatasetFetcher",
    )
)
RUN_BACKWARD = known(
    "torch.autograd:_engine_run_backward", "to see backward passes begin and end", "capture/steps torch_hooks"
)
STORAGE_USES = known(
    "torch._C:_storage_Use_Count",
    "to tell memory that somebody else has a view of",
    "capture/dispatch capture/steps engine techniques",
)

MODULE_APPLY = known(
    "torch.nn:Module._apply",
    "to keep parameters the same objects when a module moves, and at the host what a plan streams from there",
    "capture/patches torch_hooks",
)

GRAPH_TASK_ID = known(
    "torch._C:_current_graph_task_id",
    "to tell what runs within a backward pass",
    "capture/child_process capture/patches guarding techniques torch_hooks",
)

SET_VERSIONS = known(
    "torch._C._autograd:_unsafe_set_version_counter",
    "to try out whether a graph still needs parameters that were updated, without updating them, and to move a parameter"
    " without a write to what graphs have saved",
    "capture/patches techniques",
)

IN_BOTH: tuple[Name, ...] = (
    known("torch:Tensor._indices", "to see the parts of a sparse tensor", "capture/dispatch runtime"),
    known("torch:Tensor._values", "to see the parts of a sparse tensor", "capture/dispatch runtime"),
    known(
        "torch:_dynamo",
        "to load the compiler only where it compiles",
        "capture/dispatch capture/patches techniques",
        is_checked=False,
    ),
    known(
        "torch.cuda:_sleep",
        "to answer for the virtual card, and to keep a card busy while what is timed is issued",
        "capture/patches calibration",
        is_checked=False,
    ),
    LOADER_ITERATOR,
    NUM_DISPATCH_MODES,
    known(
        "torch._C:_len_torch_function_stack",
        "to see the modes that the program has entered",
        "capture/steps techniques",
    ),
    TOP_SAVED_HOOKS,
    known(
        "torch:Tensor._make_wrapper_subclass",
        "to have tensors that are computed when they are needed, or not at all",
        "capture/steps techniques",
    ),
    known(
        "torch._C._functorch:peek_interpreter_stack",
        "to compare and repeat nothing within torch.func transforms",
        "capture/steps techniques",
    ),
    known("torch:Tensor._is_view", "to see whether a tensor is a view", "capture/dispatch capture/steps techniques"),
    RUN_BACKWARD,
    SET_VERSIONS,
    GRAPH_TASK_ID,
    MODULE_APPLY,
    STORAGE_USES,
    known(
        "torch._C:_set_throw_on_mutable_data_ptr",
        "to make tensors without data, whose memory C++ code may not read",
        "capture/dispatch techniques",
    ),
    # Tensors among arguments.
    known(
        "torch.utils._pytree:tree_leaves",
        "to find tensors among arguments",
        "capture/dispatch capture/patches capture/steps effects guarding techniques",
    ),
    known(
        "torch.utils._pytree:tree_map", "to find tensors among arguments", "capture/dispatch capture/patches techniques"
    ),
    known(
        "torch.utils._pytree:tree_map_only", "to find tensors among arguments", "capture/patches guarding techniques"
    ),
    # Tensors without data, modes and operators.
    known(
        "torch._ops:OpOverload",
        "to tell operators apart",
        "capture/collectives capture/dispatch capture/kernels capture/observe capture/patches effects techniques",
    ),
    known(
        "torch._subclasses.fake_tensor:DynamicOutputShapeException",
        "to tell operators whose shapes depend on values",
        "capture/dispatch effects",
    ),
    known(
        "torch._subclasses.fake_tensor:FakeTensor",
        "to have tensors without data",
        "capture/collectives capture/dispatch capture/kernels capture/patches capture/steps effects engine techniques",
    ),
    known(
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "to run operators on tensors without data",
        "capture/dispatch capture/kernels effects techniques",
    ),
    known(
        "torch._subclasses.fake_tensor:UnsupportedOperatorException",
        "to tell operators without a rule for shapes",
        "capture/dispatch effects",
    ),
    known(
        "torch._subclasses.fake_tensor:in_kernel_invocation_manager",
        "to run kernels for tensors without data at once",
        "effects",
    ),
    known("torch.overrides:_get_current_function_mode_stack", "to see the modes around a call", "effects techniques"),
    known("torch.utils._device:DeviceContext", "to tell the mode of a default device", "effects"),
    known("torch.nn:Module._call_impl", "to see whether a program has put its own there", "effects"),
    known("torch.nn:Module._wrapped_call_impl", "to see whether a program has put its own there", "effects"),
    known(
        "torch.utils._python_dispatch:TorchDispatchMode",
        "to see operators",
        "capture/dispatch effects guarding runtime techniques",
    ),
    known(
        "torch.utils._python_dispatch:_disable_current_modes",
        "to run operators of our own that no mode sees",
        "effects techniques",
    ),
    known("torch._C:DisableTorchFunction", "to run operators of our own that no mode sees", "effects"),
    *(
        known(
            f"torch._C:{name}",
            "to run code again with the precision of its first run",
            "effects",
            first="2.9",
            before="`allow_tf32` says it",
        )
        for name in ("_get_fp32_precision_getter", "_set_fp32_precision_setter")
    ),
    known(
        "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
        "to leave modes only where there are some",
        "effects techniques",
    ),
    known(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
        "to tell sharded and quantised tensors",
        "capture/patches capture/steps effects engine guarding techniques",
    ),
    known(
        "torch:ops.aten.add.Tensor._schema",
        "to see what an operator reads and writes",
        "capture/collectives capture/dispatch capture/kernels effects guarding techniques",
    ),
    # Autograd.
    known(
        "torch._C._autograd:_saved_tensors_hooks_is_enabled",
        "to see whether hooks for saved tensors are switched off",
        "effects",
    ),
    known("torch._C._functorch:get_unwrapped", "to look inside of torch.func transforms", "effects"),
    known(
        "torch._C._functorch:is_functorch_wrapped_tensor",
        "to tell tensors inside of torch.func transforms",
        "effects techniques",
    ),
    known(
        "torch.autograd.graph:_allow_mutation_on_saved_tensors_enabled",
        "to see whether saved tensors may be written to",
        "effects techniques",
    ),
    known(
        "torch.nn.utils.parametrize:_cache",
        "to have code that is run again find the weights that are held by parametrize.cached",
        "effects",
    ),
    known(
        "torch.nn.utils.parametrize:_cache_enabled",
        "to have code that is run again find whether weights are held by parametrize.cached",
        "effects",
    ),
    known(
        "torch.autograd:Function._backward_cls._forward_cls",
        "to find the autograd function of a node",
        "effects techniques torch_hooks",
    ),
    known(
        "torch._C:_functions.AccumulateGrad._sequence_nr",
        "to find the forward operator of a backward node",
        "capture/observe capture/steps effects techniques",
    ),
    known(
        "torch.autograd:_get_sequence_nr",
        "to find the forward operator of a backward node",
        "capture/observe capture/steps effects techniques",
    ),
    # Tensors and storages.
    known("torch:Tensor._is_zerotensor", "to tell tensors without a storage", "effects engine"),
    known(
        "torch:Tensor._version",
        "to see whether a tensor was written to",
        "capture/patches capture/steps effects engine guarding techniques",
    ),
    known(
        "torch:UntypedStorage._cdata",
        "to tell storages apart",
        "capture/collectives capture/dispatch capture/observe capture/patches capture/steps effects engine guarding runtime techniques torch_hooks",
    ),
    # Hooks and parts of modules, tensors and optimizers.
    known("torch.nn.modules.module:_global_backward_hooks", "to see hooks on all modules", "effects"),
    known("torch.nn.modules.module:_global_backward_pre_hooks", "to see hooks on all modules", "effects"),
    known("torch.nn.modules.module:_global_buffer_registration_hooks", "to see hooks on all modules", "effects"),
    known(
        "torch.nn.modules.module:_global_forward_hooks",
        "to see hooks on all modules",
        "capture/steps effects techniques",
    ),
    known(
        "torch.nn.modules.module:_global_forward_pre_hooks",
        "to see hooks on all modules",
        "capture/steps effects techniques",
    ),
    known("torch.nn.modules.module:_global_module_registration_hooks", "to see hooks on all modules", "effects"),
    known("torch.nn.modules.module:_global_parameter_registration_hooks", "to see hooks on all modules", "effects"),
    known(
        "torch.nn:Module._backward_hooks",
        "to see hooks on a module or tensor",
        "capture/steps effects guarding techniques",
    ),
    known("torch.nn:Module._backward_pre_hooks", "to see hooks on a module", "capture/steps effects techniques"),
    known(
        "torch.nn:Module._buffers",
        "to see a module's own buffers",
        "capture/patches capture/steps effects runtime techniques",
    ),
    known("torch.nn:Module._forward_hooks", "to see hooks on a module", "capture/steps effects runtime techniques"),
    known("torch.nn:Module._forward_pre_hooks", "to see hooks on a module", "capture/steps effects runtime techniques"),
    known("torch.nn:Module._modules", "to see a module's own children", "capture/steps effects runtime techniques"),
    known(
        "torch.nn:Module._parameters",
        "to see a module's own parameters",
        "capture/observe capture/patches capture/steps effects runtime techniques",
    ),
    known(
        "torch.optim.optimizer:Optimizer._optimizer_step_post_hooks",
        "to see hooks on an optimizer's step, and to order them",
        "capture/steps guarding techniques torch_hooks",
    ),
    known(
        "torch.optim.optimizer:Optimizer._optimizer_step_pre_hooks",
        "to see hooks on an optimizer's step, and to order them",
        "capture/steps guarding runtime techniques torch_hooks",
    ),
    known(
        "torch:Tensor._post_accumulate_grad_hooks",
        "to see hooks on the gradient of a leaf",
        "capture/steps guarding techniques",
    ),
    # The card: context, allocator, compiler.
    known("torch.cuda.memory:_record_memory_history", "to record what the allocator does", "capture/patches runtime"),
    known(
        "torch.cuda.memory:_set_allocator_settings",
        "to change the settings of the allocator",
        "capture/patches techniques",
    ),
    # Operators.
    *operators("capture/dispatch effects", "_local_scalar_dense _reshape_alias"),
    *operators("capture/dispatch effects techniques", "_unsafe_view"),
    *operators("capture/dispatch effects techniques", "_to_copy"),
    *operators("capture/kernels techniques", "_addmm_activation _foreach_norm"),
    *operators("capture/dispatch effects", "_is_all_true _is_any_true"),
)
"""What both the child and a user's process use."""

IN_CHILD: tuple[Name, ...] = (
    FETCHER,
    MAP_FETCHER,
    ITERABLE_FETCHER,
    *(
        known(
            f"{package}.loops.training_epoch_loop:_TrainingEpochLoop",
            "to end Lightning's loop after the steps, and have it validate",
            "capture/after_steps",
            first="2.6",
            last="2.6",
            is_checked=False,
        )
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
    # Tensors among arguments.
    known("torch.utils._pytree:TreeSpec", "to compare the inputs of steps", "capture/steps"),
    known("torch.utils._pytree:tree_flatten", "to find tensors among arguments", "capture/steps"),
    known("torch.utils._pytree:tree_unflatten", "to put tensors back among arguments", "capture/steps"),
    # Tensors without data, modes and operators.
    known("torch._C:DispatchKey.CUDA", "to see which kernels an operator has", "capture/dispatch"),
    known("torch._C:DispatchKey.CompositeImplicitAutograd", "to see which kernels an operator has", "capture/dispatch"),
    known("torch._C:_dispatch_has_kernel_for_dispatch_key", "to see which kernels an operator has", "capture/kernels"),
    known("torch._C:_get_sdp_priority_order", "to choose the attention kernel that a card would", "capture/kernels"),
    known(
        "torch._prims_common:suggest_memory_format", "to lay out a result in memory as a card does", "capture/kernels"
    ),
    known(
        "torch._subclasses.fake_impls:register_op_impl",
        "to give operators shapes that torch has no rule for",
        "capture/dispatch capture/kernels",
    ),
    known(
        "torch._subclasses.fake_tensor:DataDependentOutputException",
        "to tell operators whose results depend on values",
        "capture/dispatch",
    ),
    known(
        "torch._subclasses.fake_tensor:init_gpu_context",
        "to make no context on a card for tensors without data",
        "capture/patches",
    ),
    known(
        "torch.utils._device:_device_constructors", "to see tensors being made on a default device", "capture/patches"
    ),
    known("torch.jit:_builtins._find_builtin", "to have replaced operators in scripts", "capture/patches"),
    known("torch.jit:_builtins._register_builtin", "to have replaced operators in scripts", "capture/patches"),
    known("torch:ops.aten.add.Tensor._overloadpacket", "to count the FLOPs of an operator", "capture/dispatch"),
    # Autograd.
    known("torch._C:_current_autograd_node", "to find the backward node that is running", "capture/observe"),
    # Tensors and storages.
    known("torch._C:Generator", "to have random generators of a card", "capture/patches"),
    known("torch._C:TensorBase.data", "to keep a parameter the same object when it moves", "capture/patches"),
    known("torch._C:_set_only_lift_cpu_tensors", "to see numbers that become tensors on the card", "capture/patches"),
    known(
        "torch._C:_DisableTorchDispatch",
        "to make tensors without data that no mode takes for the program's",
        "capture/dispatch capture/steps",
    ),
    known("torch:Tensor._make_subclass", "to make tensors without data as torch does", "capture/dispatch"),
    known("torch._C:_swap_tensor_impl", "to keep a parameter the same object when it moves", "capture/patches"),
    known(
        "torch:_has_compatible_shallow_copy_type",
        "to keep a parameter the same object when it moves",
        "capture/patches",
    ),
    # Hooks and parts of modules, tensors and optimizers.
    known("torch.nn.modules.batchnorm:_NormBase", "to tell norms with running statistics", "capture/steps"),
    known(
        "torch.optim.optimizer:_foreach_supported_types",
        "to have virtual tensors updated as real ones are",
        "capture/patches",
    ),
    known("torch.optim.optimizer:_global_optimizer_post_hooks", "to see hooks on all optimizers", "capture/steps"),
    known("torch.optim.optimizer:_global_optimizer_pre_hooks", "to see hooks on all optimizers", "capture/steps"),
    known(
        "torch.utils._foreach_utils:_foreach_supported_types",
        "to have virtual tensors updated as real ones are",
        "capture/patches",
    ),
    # The card: context, allocator, compiler.
    ENSURE_GUARD,
    known(
        "torch._C:_cuda_getCurrentRawStream",
        "to answer for the virtual card",
        "capture/patches",
        is_checked=False,
        is_in_cpu_builds=False,
    ),
    known(
        "torch._C:_scatter",
        "to have data parallelism over one card",
        "capture/dispatch",
        is_checked=False,
        is_in_cpu_builds=False,
    ),
    known(
        "torch._dynamo:_trace_wrapped_higher_order_op",
        "to load the compiler only where it compiles",
        "capture/patches",
        is_checked=False,
    ),
    known("torch.cuda.memory:_dump_snapshot", "to answer for the virtual card", "capture/patches", is_checked=False),
    known("torch.cuda:_DeviceGuard", "to answer for the virtual card", "capture/patches", is_checked=False),
    known("torch.cuda:_exchange_device", "to answer for the virtual card", "capture/patches", is_checked=False),
    known("torch.cuda:_get_device", "to answer for the virtual card", "capture/patches", is_checked=False),
    known("torch.cuda:_lazy_call", "to answer for the virtual card", "capture/patches", is_checked=False),
    known("torch.cuda:_lazy_init", "to answer for the virtual card", "capture/patches", is_checked=False),
    known("torch.cuda:_maybe_exchange_device", "to answer for the virtual card", "capture/patches", is_checked=False),
    # Process groups of a distributed program.
    known("torch._C:_get_dispatch_mode", "to tell operators that only ask for shapes", "capture/dispatch"),
    known("torch._C:_TorchDispatchModeKey.FAKE", "to tell operators that only ask for shapes", "capture/dispatch"),
    WRAP_COLLECTIVE,
    *(
        known(path, purpose, "capture/collectives", is_checked=False)
        for path, purpose in (
            ("torch._C:_jit_get_all_schemas", "to find the operators of collectives"),
            ("torch.distributed:Reducer._set_static_graph", "to keep the reducer from asking the card for times"),
            (
                "torch.distributed:Reducer._set_ddp_runtime_logging_sample_rate",
                "to keep the reducer from asking the card for times",
            ),
            ("torch._C._distributed_c10d:_create_work_from_future", "to return what a collective is waited for with"),
            (
                "torch.distributed.distributed_c10d:_new_process_group_helper",
                "to have every process group be a fake one",
            ),
            (
                "torch.distributed.distributed_c10d:_get_object_coll_device",
                "to receive objects where torch would",
            ),
            ("torch.distributed.distributed_c10d:_resolve_process_group", "to find the group of a collective"),
            ("torch.distributed.distributed_c10d:_world.pg_map", "to tell a program the backend that it asked for"),
            ("torch.distributed:ProcessGroup._set_default_backend", "to have every process group be a fake one"),
            ("torch.testing._internal.distributed:fake_pg", "to have every process group be a fake one"),
            ("torch:ops._c10d_functional", "to follow collectives"),
            ("torch.distributed:Reducer._rebuild_buckets", "to tell buckets of gradients"),
            (
                "torch.distributed.checkpoint.default_planner:_validate_global_plan",
                "to have a checkpoint of one rank planned",
            ),
            ("torch.distributed:_functional_collectives.AsyncCollectiveTensor", "to follow collectives"),
            ("torch:ops.c10d._allgather_base_", "to follow collectives"),
            ("torch:ops.c10d._reduce_scatter_base_", "to follow collectives"),
        )
    ),
    # Operators.
    *_RMS_NORM,
    *_GROUPED,
    *operators(
        "capture/dispatch",
        "_amp_foreach_non_finite_check_and_unscale_ _ctc_loss _foreach_copy_ _fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_ _pack_padded_sequence _sparse_compressed_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors _thnn_fused_gru_cell _thnn_fused_gru_cell_backward",
    ),
    *operators(
        "capture/dispatch",
        "_adaptive_avg_pool2d _cdist_forward _linalg_det _linalg_eigh _linalg_solve_ex _linalg_svd _prelu_kernel _upsample_bilinear2d_aa _upsample_nearest_exact2d",
    ),
    *operators(
        "capture/dispatch capture/kernels", "_ctc_loss_backward _index_put_impl_ _log_softmax _softmax _unique2"
    ),
    *operators(
        "capture/kernels",
        "_cudnn_rnn _cudnn_rnn_backward _embedding_bag_dense_backward _fft_c2c _fft_c2r _fft_r2c _int_mm _log_softmax_backward_data _native_batch_norm_legit _safe_softmax _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward _scaled_mm _softmax_backward_data _unsafe_index_put",
    ),
)


def check() -> None:
    """Looks for all of these names in the installed torch.

    Raises:
        UnsupportedTorch: it lacks some.
        ModuleNotFoundError: there is no torch.
    """
    require((*IN_BOTH, *IN_CHILD))
