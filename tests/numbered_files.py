"""Files of any format whose rows are the numbers from 0 on."""

import itertools
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter

import replicax as rx
from tfrecord_files import masked_crc32c


def write_tfrecords(path, numbers):
    with open(path, "wb") as file:
        for number in numbers:
            length, record = struct.pack("<Q", 8), struct.pack("<q", number)
            file.write(length + struct.pack("<I", masked_crc32c(length)))
            file.write(record + struct.pack("<I", masked_crc32c(record)))


def write_array_records(path, numbers):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for number in numbers:
        writer.write(struct.pack("<q", number))
    writer.close()


def write_lines(path, numbers):
    path.write_text("".join(f"{number}\n" for number in numbers))


def write_csv(path, numbers):
    path.write_text("n\n" + "".join(f"{number}\n" for number in numbers))


def write_parquet(path, numbers, row_group_size=3):
    pq.write_table(pa.table({"n": pa.array(numbers, pa.int64())}), path, row_group_size=row_group_size)


def parse_bytes(record):
    return {"n": np.frombuffer(record, np.int64)[0]}


KINDS = {
    "tfrecords": (write_tfrecords, lambda files: rx.data.from_tfrecords(files).map(parse_bytes)),
    "array_records": (write_array_records, lambda files: rx.data.from_array_records(files).map(parse_bytes)),
    "lines": (
        write_lines,
        lambda files: rx.data.from_text_lines(files).map(lambda line: {"n": np.int64(line)}),
    ),
    "csv": (write_csv, rx.data.from_csv),
    "parquet": (write_parquet, rx.data.from_parquet),
}


def make_numbers(folder, kind, sizes):
    """Files whose rows are the numbers from 0 on: the dataset, and the rows of each file."""
    write, make = KINDS[kind]
    rows, files = itertools.count(), []
    numbers = [list(itertools.islice(rows, size)) for size in sizes]
    for index, of_file in enumerate(numbers):
        files.append(folder / f"part-{index:03d}")
        write(files[-1], of_file)
    return make(files), numbers


def rows_in(steps):
    return [row for step in steps for row in step.tree.unflatten(step.arrays)["n"].tolist()]
