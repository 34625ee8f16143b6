"""Runs the examples of the table of names with TensorFlow and writes the results to ``recorded.json``.

Run it with a Python that has TensorFlow 2.21: ``python tests/migrate/table_examples.py``.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from replicax._migrate import table

RECORDED = Path(__file__).with_name("recorded.json")


def examples() -> list[str]:
    """All examples of the table, in order."""
    return list(dict.fromkeys(example for row in table.rows() for example in row.examples))


def observe(value: Any) -> Any:
    """A result as JSON: lists, arrays of any library with their dtypes."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: observe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [observe(item) for item in value]
    array = np.asarray(value)
    if array.dtype.kind == "c":
        return {"dtype": str(array.dtype), "value": np.stack([array.real, array.imag], -1).tolist()}
    if array.dtype.kind not in "fiub":  # bfloat16
        return {"dtype": str(array.dtype), "value": array.astype(np.float32).tolist()}
    return {"dtype": str(array.dtype), "value": array.tolist()}


def record() -> dict[str, Any]:
    """Returns the result of each example in TensorFlow."""
    import tensorflow as tf

    gave, failed = {}, []
    for example in examples():
        try:
            gave[example] = observe(eval(example, {"tf": tf}))
        except Exception as error:
            failed.append(f"{example}: {type(error).__name__}: {error}")
    if failed:
        raise RuntimeError("\n".join(["These examples failed:", *failed]))
    return gave


def main() -> None:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    gave = record()
    lines = [f"  {json.dumps(example)}: {json.dumps(value)}" for example, value in gave.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(gave)} examples -> {RECORDED}")


if __name__ == "__main__":
    main()
