"""The fixtures of tests/gpu, for the plugin's families on a GPU: `make gpu` names this folder, too."""

from tests.gpu.conftest import alone, device, exact_products, plain_launches, pytest_sessionstart, turn

__all__ = ["alone", "device", "exact_products", "plain_launches", "pytest_sessionstart", "turn"]
