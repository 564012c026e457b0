from dschat_lora.supervised.loop import queue_steps


def train_steps(*arguments):
    """What each of :func:`queue_steps` found, read before the next one begins."""
    return (read() for read in queue_steps(*arguments))
