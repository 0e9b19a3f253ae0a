"""A pytest plug-in that runs inside of sandboxes while a package is looked at: changed conditions, and who calls what.

Its source is put at the root of the validation workspace and loaded with `-p etude_probe`; it never becomes part of a
task. It is standard library only and imports nothing of etude. Settings come by environment, the answer goes to a file:

    ETUDE_PROBE_OUT     where the JSON goes: {"tests": {id: outcome}, "messages": {id: text}, "complete": true, ...}
    ETUDE_PROBE_ORDER   "reverse", or "shuffle:SEED"
    ETUDE_PROBE_CLOCK   seconds that time.time and time.time_ns are off
    ETUDE_PROBE_TRACE   "1": which function of the workspace ran in which test, by a profile hook (calls, not lines)

Functions that run while modules are imported or tests collected are listed under "": running then is not being used.
"""

import json
import os
import random
import sys
import threading
import time

_OUT = os.environ.get("ETUDE_PROBE_OUT", "")
_ROOT = os.getcwd() + os.sep
_outcomes: dict = {}
_messages: dict = {}
_functions: dict = {}
_by_test: dict = {"": set()}
_now = _by_test[""]


def _place(code):
    """Number of a function of the workspace, or -1."""
    path = code.co_filename
    if not path.startswith(_ROOT) or code.co_name.startswith("<"):
        return -1
    path = path[len(_ROOT) :]
    return -1 if path.startswith(".deps") or path == "etude_probe.py" else len(_functions)


def _called(frame, event, _argument):
    if event == "call":
        code = frame.f_code
        number = _functions.get(code)
        if number is None:
            number = _functions[code] = _place(code)
        if number >= 0:
            _now.add(code)


if os.environ.get("ETUDE_PROBE_CLOCK"):
    _off = int(os.environ["ETUDE_PROBE_CLOCK"])
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + _off
    time.time_ns = lambda: _time_ns() + _off * 10**9

if os.environ.get("ETUDE_PROBE_TRACE"):
    threading.setprofile(_called)
    sys.setprofile(_called)


def pytest_collection_modifyitems(items):
    order = os.environ.get("ETUDE_PROBE_ORDER", "")
    if order == "reverse":
        items.reverse()
    elif order.startswith("shuffle:"):
        random.Random(int(order[8:])).shuffle(items)


def pytest_runtest_logstart(nodeid, location):
    global _now
    _now = _by_test.setdefault(nodeid, set())
    if os.environ.get("ETUDE_PROBE_TRACE") and sys.getprofile() is not _called:
        sys.setprofile(_called)  # a test before this one took it away


def pytest_runtest_logreport(report):
    name = report.nodeid
    expected = hasattr(report, "wasxfail")
    if report.outcome == "failed":
        _outcomes[name] = "failed" if report.when == "call" else "error"
        _messages[name] = str(report.longrepr)[-400:]
    elif report.outcome == "skipped":
        _outcomes[name] = "xfailed" if expected else "skipped"
    elif report.when == "call":
        _outcomes.setdefault(name, "xpassed" if expected else "passed")


def pytest_collectreport(report):
    if report.outcome == "failed":
        _outcomes[report.nodeid] = "error"
        _messages[report.nodeid] = str(report.longrepr)[-400:]


def pytest_sessionfinish(session, exitstatus):
    sys.setprofile(None)
    known = {code: number for number, code in enumerate(c for c, n in _functions.items() if n >= 0)}
    answer = {
        "tests": _outcomes,
        "messages": _messages,
        "complete": True,
        "functions": [[code.co_filename[len(_ROOT) :], code.co_firstlineno, code.co_name] for code in known],
        "by_test": {name: sorted(known[code] for code in codes) for name, codes in _by_test.items()},
    }
    if _OUT:
        with open(_OUT, "w") as file:
            json.dump(answer, file)
