"""Import this in the server that ranks are forked from: a failed assertion of a test on a rank shows its values."""

from _pytest.assertion import install_importhook
from _pytest.config import get_config

install_importhook(get_config())
