"""A small trained tokenizer shared by the tests of text."""

import pytest

from etude.text.tokenizer import Tokenizer, train_tokenizer

CORPUS = [
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)\n",
    '<call name="read_file">\n<path>shop/stats.py</path>\n</call>',
    '<call name="run_terminal">\n<command>pytest -q</command>\n</call>',
    "<result>2 passed in 0.01s</result>",
    "class Shop:\n    def __init__(self, name):\n        self.name = name\n        self.items_1234 = []\n",
] * 5


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(CORPUS, 394)
