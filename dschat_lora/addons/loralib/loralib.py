"""The names of microsoft/LoRA's ``loralib``, for code written for it (arXiv:2106.09685).

``import dschat_lora.addons.loralib.loralib as lora`` takes the place of ``import loralib as lora``:
the same constructors, initial values, names and shapes in the state dict. Where loralib goes wrong
it differs:

* Weights are never merged in place, so a state dict saved after ``eval()`` holds the base, and no
  value drifts. ``merge_weights`` is accepted and without effect; :func:`merged_copy` merges.
* ``train()`` and ``eval()`` return the layer; every layer pickles.
* Convolutions take any kernel, and dropout applies.
* MergedLinear takes groups of unequal sizes, and none enabled gives the frozen base.
* Factors are float32 whatever the base's type.
"""

from dschat_lora.addons.loralib.layers import Conv1d as Conv1d
from dschat_lora.addons.loralib.layers import Conv2d as Conv2d
from dschat_lora.addons.loralib.layers import Conv3d as Conv3d
from dschat_lora.addons.loralib.layers import ConvLoRA as ConvLoRA
from dschat_lora.addons.loralib.layers import Embedding as Embedding
from dschat_lora.addons.loralib.layers import Linear as Linear
from dschat_lora.addons.loralib.layers import LoRALayer as LoRALayer
from dschat_lora.addons.loralib.layers import MergedLinear as MergedLinear
from dschat_lora.addons.loralib.utils import lora_state_dict as lora_state_dict
from dschat_lora.addons.loralib.utils import (
    mark_only_lora_as_trainable as mark_only_lora_as_trainable,
)
from dschat_lora.addons.loralib.utils import merged_copy as merged_copy
