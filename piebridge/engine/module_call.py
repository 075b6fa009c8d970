"""Calling a module with other tensors in the place of its own."""

import contextlib


def call_with(module, tensors, inputs):
    """module(*inputs) with `tensors` ({state dict key: tensor}) in the place of its parameters and buffers of these keys.

    A tensor that the module knows by several names is replaced under all of them. As torch.func.functional_call does it, but for modules
    too that have a method of a submodule's name, which that one takes for the submodule: GraphNetworks of MobileNetV3 ("features").
    """
    own = dict(module.named_parameters(), **dict(module.named_buffers()))
    with _in_place_of(module, {id(own[key]): tensor for key, tensor in tensors.items()}):
        return module(*inputs)


@contextlib.contextmanager
def _in_place_of(module, tensors):
    """tensors: {id of a parameter or buffer: tensor}"""
    replaced = []
    try:
        for holder in module.modules():
            for registry in (holder._parameters, holder._buffers):
                for name, tensor in registry.items():
                    if id(tensor) in tensors:
                        replaced.append((registry, name, tensor))
                        registry[name] = tensors[id(tensor)]
        yield
    finally:
        for registry, name, tensor in replaced:
            registry[name] = tensor
