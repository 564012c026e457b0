"""``python -m dschat_lora``: the same as ``dschat-lora``."""

from dschat_lora.cli.main import main

if __name__ == "__main__":
    main()
