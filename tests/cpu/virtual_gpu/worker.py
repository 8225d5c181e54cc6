"""Runs every check of the modules beside it on a virtual RTX 4090 and prints one line of JSON for each: its name and what went wrong.

worker.py [NAME ...]
"""

import inspect
import json
import os
import sys
import traceback
import warnings

CHECKS = (
    "checks_of_arguments",
    "checks_of_conditions",
    "checks_of_copies",
    "checks_of_repeated_calls",
    "checks_of_the_card",
    "checks_of_tensors",
    "checks_of_training",
)


def names_of(module):
    """The checks of a module: its public functions without parameters that say something."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and name.count("_") >= 2
    ]


def main(chosen):
    from tightfit.capture.child_process.capture_session import CaptureSession

    session = CaptureSession("RTX 4090", 3, by_yield=True)
    session.watch.begin_yielded_step()
    warnings.simplefilter("ignore")
    for module in map(__import__, CHECKS):
        for name in names_of(module):
            if chosen and name not in chosen:
                continue
            print(json.dumps({"begins": name}), flush=True)
            said = ""
            with session.gpu:
                try:
                    getattr(module, name)()
                except BaseException:  # noqa: BLE001 - whatever it is, it is the answer
                    said = traceback.format_exc()
            print(json.dumps({"name": name, "said": said}), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
