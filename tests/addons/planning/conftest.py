from fakecuda.conftest import fake_device  # noqa: F401
