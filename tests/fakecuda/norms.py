"""torch's RMSNorm on a GPU: a kernel for each pass, of which a CPU build has none."""

import torch

LIBRARY = torch.library.Library("fakecuda", "DEF")
LIBRARY.define("rms_norm(Tensor x, Tensor weight) -> (Tensor, Tensor)")
LIBRARY.define("rms_norm_backward(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)")


@torch.library.register_fake("fakecuda::rms_norm", lib=LIBRARY)
def _(x, weight):
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


@torch.library.register_fake("fakecuda::rms_norm_backward", lib=LIBRARY)
def _(grad, x, weight):
    return torch.empty_like(x), torch.empty_like(weight)


class RmsNorm(torch.autograd.Function):
    """Keeps its input, as it is, and a number for each row."""

    @staticmethod
    def forward(ctx, x, weight):
        output, scale = torch.ops.fakecuda.rms_norm(x, weight)
        ctx.save_for_backward(x, weight, scale)
        return output

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.fakecuda.rms_norm_backward(grad, *ctx.saved_tensors[:2])


def on_cuda(plain):
    """``torch.nn.functional.rms_norm`` that is such a kernel for what lies on the device."""

    def rms_norm(x, shape, weight=None, eps=None):
        alike = weight is not None and weight.dtype == x.dtype
        if not (alike and x.device.type == "cuda"):
            return plain(x, shape, weight, eps)
        return RmsNorm.apply(x, weight)

    return rms_norm
