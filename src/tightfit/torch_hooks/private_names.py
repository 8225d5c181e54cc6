"""Names of torch that it does not promise to keep and that are read in a user's process, with what each is for; nothing is put in their place.

They were seen in torch 2.11 to 2.13. Those that `manifest` looks up when they are needed are there. A test compares this list with the source.
"""

READ: dict[str, str] = {
    "torch.Tensor._make_wrapper_subclass": "tensors that are not computed until somebody needs them",
    "torch._C.DisableTorchFunctionSubclass": "operators on such tensors without their own rules",
    "torch._C._autograd._saved_tensors_hooks_is_enabled": "whether the program has switched off hooks for saved tensors",
    "torch._C._are_functorch_transforms_active": "to refuse what torch.func transforms would see",
    "torch._C._functorch.peek_interpreter_stack": "to compare nothing within torch.func transforms",
    "torch._disable_dynamo": "to keep the compiler out of code of ours, without importing it before it is needed",
    "torch._foreach_mul_": "to scale gradients in few kernels",
    "torch._ops.OpOverload": "to tell operators apart",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "operators whose shapes depend on values",
    "torch._subclasses.fake_tensor.FakeTensor": "tensors without values",
    "torch._subclasses.fake_tensor.FakeTensorMode": "tensors without values",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": "operators without a rule for shapes",
    "torch.autograd.graph._allow_mutation_on_saved_tensors_enabled": "to run no graph twice that gives what it saved as it was",
    "torch.autograd.forward_ad._current_level": "to refuse what forward-mode derivatives would see",
    "torch.cuda.memory._get_memory_metadata": "to leave as it was what is stamped on events of the allocator",
    "torch.cuda.memory._record_memory_history": "torch's own recorder of its allocator",
    "torch.cuda.memory._set_allocator_settings": "to change the settings of the allocator",
    "torch.cuda.memory._set_memory_metadata": "to stamp events of the allocator",
    "torch.cuda.memory._snapshot": "what torch's recorder recorded",
    "torch.nn.modules.batchnorm._BatchNorm": "all batch norms",
    "torch.nn.modules.conv._ConvNd": "all convolutions",
    "torch.nn.modules.dropout._DropoutNd": "all dropouts",
    "torch.nn.utils.stateless._reparametrize_module": "to run a module once with other weights",
    "torch.overrides._get_current_function_mode_stack": "to tell which modes are around a call",
    "torch.utils._device.DeviceContext": "to tell the mode of a default device",
    "torch.utils._python_dispatch.TorchDispatchMode": "to see operators",
    "torch.utils._python_dispatch._disable_current_modes": "operators of our own that no mode sees",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "to tell sharded and quantised tensors",
    "torch.utils._pytree.keystr": "the names of tensors among arguments",
    "torch.utils._pytree.tree_flatten_with_path": "the names of tensors among arguments",
    "torch.utils._pytree.tree_leaves": "tensors among arguments",
    "torch.utils._pytree.tree_map": "tensors among arguments",
    "torch.utils._pytree.tree_map_only": "tensors among arguments",
    "torch.utils.checkpoint._StopRecomputationError": "to tell a recomputation that ended early from an error",
}

ON_OBJECTS: dict[str, str] = {
    "_backward_hooks": "hooks on a tensor",
    "_buffers": "a module's buffers by name",
    "_cdata": "a number for a storage",
    "_compiled_call_impl": "whether a module was compiled in place",
    "_forward_cls": "where an autograd function in Python comes from",
    "_is_view": "whether a tensor is a view",
    "_modules": "a module's children by name",
    "_optimizer_step_post_hooks": "the order of an optimizer's hooks",
    "_optimizer_step_pre_hooks": "the order of an optimizer's hooks",
    "_orig_mod": "the module that was compiled",
    "_parameters": "a module's parameters by name",
    "_post_accumulate_grad_hooks": "hooks on the gradient of a leaf",
    "_schema": "what an operator writes to",
    "_version": "whether a tensor was written to",
}
"""Attributes of torch's objects, likewise. Objects have others of the same names, so these are not compared."""
