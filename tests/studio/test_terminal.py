"""Live progress, away from a terminal: plain lines."""

from __future__ import annotations

import io

from rich.console import Console

from etude.studio.terminal import Progress


def test_an_alarm_is_a_line_that_says_what_to_do():
    console = Console(file=io.StringIO(), width=200)
    with Progress("title", 4, console) as progress:
        progress.see({"kind": "step", "step": 0, "metrics": {"ess": 0.2}})
        assert "alarm" not in console.file.getvalue()
        progress.see({"kind": "alarm", "step": 0, "metric": "ess", "value": 0.2, "threshold": 0.3, "advice": "lower the learning rate"})
        console.print(progress.render())
    text = console.file.getvalue()
    assert "alarm at step 0: ess = 0.2, threshold 0.3; lower the learning rate" in text
    assert text.count("alarm at step 0: ess = 0.2, threshold 0.3") == 2, "as a line, and in the panel"
