"""Data that is read while training."""

from dataclasses import replace

from dschat_lora.addons.streaming.options import StreamingOptions
from dschat_lora.config.data import DataConfig


def streaming(paths, *, data=DataConfig, shuffle_buffer_size=10_000, **options):
    """The options of data at these paths, read on with a buffer of this size."""
    options = {"eval_ratio": 0.0, "preprocessing_num_workers": 1} | options
    found = data(data_path=tuple(map(str, paths)), **options)
    return replace(found, tail=StreamingOptions(True, shuffle_buffer_size))
