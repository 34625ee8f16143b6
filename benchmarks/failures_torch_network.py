"""The network of ``failures.py`` in torch, with the weights that all contestants begin with."""

import os

import torch

import failures_training as training


def layers():
    weights = training.initial_weights(os.environ[training.MODEL])
    made = []
    for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
        linear = torch.nn.Linear(*kernel.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(kernel).T)
            linear.bias.copy_(torch.from_numpy(bias))
        made += [linear, torch.nn.ReLU()]
    return made[:-1]


def weights_of(network):
    """Kernels and biases in turn, as in ``failures_training.initial_weights``."""
    linears = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
    return [array.detach().numpy() for linear in linears for array in (linear.weight.T, linear.bias)]
