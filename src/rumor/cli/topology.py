import argparse
from typing import Any
def add_to(commands: Any) -> None:
    pass
