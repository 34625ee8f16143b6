"""Draws the pictures of the pages: ``python docs/pictures/draw.py`` writes the SVG files beside it.

Each picture has a light background of its own, so that it reads in the light and in the dark theme.
"""

import itertools
from pathlib import Path

FOLDER = Path(__file__).parent
INK, MUTED, PAPER, LINE = "#1f2933", "#5b6775", "#f7f9fb", "#c3ccd6"
COLOURS = ("#2f6fb3", "#3b8f5b", "#b8741a", "#8a4fa3")  # a device each
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


class Picture:
    """Shapes of one SVG, from the top left."""

    def __init__(self, width: int, height: int, title: str):
        self._size, self._title, self._shapes = (width, height), title, []

    def box(self, x, y, width, height, fill, *, stroke="none", dashed=False, opacity=1.0, radius=4):
        dash = " stroke-dasharray='4 3'" if dashed else ""
        self._shapes.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{radius}' fill='{fill}' "
            f"fill-opacity='{opacity:g}' stroke='{stroke}'{dash}/>"
        )

    def text(self, x, y, words, *, size=14, fill=INK, anchor="start", bold=False):
        weight = " font-weight='600'" if bold else ""
        self._shapes.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{fill}' text-anchor='{anchor}'{weight}>{words}</text>"
        )

    def line(self, x0, y0, x1, y1, *, arrow=False, dashed=False, stroke=MUTED):
        end = " marker-end='url(#arrow)'" if arrow else ""
        dash = " stroke-dasharray='4 3'" if dashed else ""
        self._shapes.append(
            f"<line x1='{x0:g}' y1='{y0:g}' x2='{x1:g}' y2='{y1:g}' stroke='{stroke}' stroke-width='1.3'{end}{dash}/>"
        )

    def save(self, name: str) -> None:
        width, height = self._size
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' {FONT}>\n"
            f"<title>{self._title}</title>\n"
            f"<defs><marker id='arrow' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
            f"<path d='M0 0L8 4L0 8z' fill='{MUTED}'/></marker></defs>\n"
            f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}' stroke='{LINE}'/>\n"
        )
        (FOLDER / name).write_text(head + "\n".join(self._shapes) + "\n</svg>\n")


def batch() -> None:
    picture = Picture(760, 250, "How a batch is cut over four replicas")
    unit = 5.6  # a row of the batch
    for top, sizes, words in (
        (28, (24, 24, 24, 24), "A batch of 96 rows"),
        (138, (11, 10, 10, 10), "The last batch has 41 rows"),
    ):
        picture.text(24, top + 4, words, bold=True)
        x, rows = 24.0, 0
        for replica, size in enumerate(sizes):
            width = max(sizes) * unit
            picture.box(
                x, top + 16, width, 44, COLOURS[replica], opacity=0.16, stroke=COLOURS[replica], dashed=True
            )
            picture.box(x, top + 16, size * unit, 44, COLOURS[replica], opacity=0.9)
            picture.text(x + size * unit / 2, top + 43, size, anchor="middle", fill="white", bold=True)
            picture.text(
                x, top + 78, f"replica {replica}: rows {rows}–{rows + size - 1}", size=12, fill=MUTED
            )
            rows += size
            x += max(sizes) * unit + (12 if size > 20 else 96)
    picture.text(
        24,
        240,
        "Room for the longest slice is stored; a row that is not there (dashed) is never computed with.",
        size=12,
        fill=MUTED,
    )
    picture.save("batch.svg")


def variable() -> None:
    picture = Picture(760, 300, "How variables lie over four devices")
    for left, words, note in (
        (24, "Mirrored", "each device holds all of it; reading it is free"),
        (400, "Sharded", "each device holds its rows; a step gathers them where it needs them"),
    ):
        picture.text(left, 34, words, bold=True, size=16)
        for device in range(4):
            x = left + device * 84
            picture.box(x, 56, 70, 170, "white", stroke=LINE)
            for rows in range(4):
                is_held = words == "Mirrored" or rows == device
                colour = COLOURS[rows]
                picture.box(
                    x + 8,
                    64 + rows * 39,
                    54,
                    34,
                    colour,
                    opacity=0.9 if is_held else 0.0,
                    stroke=colour if is_held else LINE,
                    dashed=not is_held,
                )
            picture.text(x + 35, 248, f"device {device}", size=12, fill=MUTED, anchor="middle")
        first, _, second = note.partition("; ")
        picture.text(left, 272, f"{first};", size=12, fill=MUTED)
        picture.text(left, 288, second, size=12, fill=MUTED)
    picture.save("variable.svg")


def step() -> None:
    picture = Picture(760, 300, "The timeline of two steps")
    rows = {"Python": 62, "reading thread": 112, "device 0": 172, "device 1": 222}
    for name, y in rows.items():
        picture.text(24, y + 5, name, size=13)
        picture.line(140, y + 22, 736, y + 22, stroke=LINE)
    start, length = 190, 262
    for number in range(2):
        left = start + number * length
        launch = 150 + number * 112
        picture.box(launch, rows["Python"] - 14, 66, 28, MUTED)
        picture.text(
            launch + 33, rows["Python"] + 5, f"run {number + 1}", anchor="middle", fill="white", size=12
        )
        placed = 150 + number * 150
        picture.box(placed, rows["reading thread"] - 14, 130, 28, COLOURS[3], opacity=0.85)
        picture.text(
            placed + 65,
            rows["reading thread"] + 5,
            f"place batch {number + 2}",
            anchor="middle",
            fill="white",
            size=12,
        )
        for device in ("device 0", "device 1"):
            y = rows[device] - 16
            parts = (
                (92, COLOURS[0], "forward"),
                (84, COLOURS[1], "backward"),
                (0, "", ""),
                (48, COLOURS[2], "update"),
            )
            x = left
            for width, colour, words in parts:
                if not width:
                    x += 34
                    continue
                picture.box(x, y, width - 3, 32, colour, opacity=0.9)
                picture.text(x + (width - 3) / 2, y + 21, words, anchor="middle", fill="white", size=12)
                x += width
        picture.box(left + 176, rows["device 0"] - 16, 31, 82, INK)
        picture.text(left + 191, rows["device 1"] + 38, "sum gradients", anchor="middle", size=12)
        picture.text(left, 28, f"step {number + 1}", size=13, bold=True)
    picture.line(140, 278, 736, 278, arrow=True)
    picture.text(736, 294, "time", size=12, fill=MUTED, anchor="end")
    picture.text(430, rows["Python"] + 5, "float(loss) waits here for step 2 …", size=12, fill=MUTED)
    picture.save("step.svg")


def scheduled_function() -> None:
    picture = Picture(760, 372, "The path of a scheduled function")
    for x, name, colour, boxes in (
        (24, "coordinator", COLOURS[0], ("trace", "Job", "JobLoop")),
        (284, "worker", COLOURS[1], ("take elements", "compute", "client of servers")),
        (544, "parameter server", COLOURS[2], ("session", "store", "log")),
    ):
        picture.box(x, 44, 192, 232, colour, opacity=0.08, stroke=colour)
        picture.text(x + 96, 32, name, anchor="middle", bold=True)
        for number, words in enumerate(boxes):
            y = 62 + 70 * number
            picture.box(x + 16, y, 160, 44, "#ffffff", stroke=colour)
            picture.text(x + 96, y + 27, words, anchor="middle")
            if number:
                picture.line(x + 96, y - 26, x + 96, y, arrow=True)
    picture.line(200, 218, 300, 96, arrow=True)
    picture.text(222, 128, "1", bold=True)
    picture.line(460, 218, 560, 96, arrow=True)
    picture.text(482, 128, "2", bold=True)
    picture.line(560, 168, 460, 234, arrow=True, dashed=True)
    picture.text(506, 236, "3", bold=True)
    picture.line(300, 252, 200, 252, arrow=True, dashed=True)
    picture.text(244, 272, "4", bold=True)
    for number, words in enumerate(
        (
            "1  program by its digest, arguments, number of the function; sent once: the program itself",
            "2  gradients and updates, by the function's number; what the next function will read",
            "3  new values, once the update is applied and, with replication=2, the backup has it too",
            "4  the result; the worker takes the next function that has come meanwhile",
        )
    ):
        picture.text(24, 302 + 18 * number, words, size=13, fill=MUTED)
    picture.save("scheduled_function.svg")


PARTS = (
    ("_launch", ("the command: launch,", "doctor, top")),
    ("_migrate", ("rewrites programs", "of TensorFlow")),
    ("_plan", ("plans for hardware,", "pictures")),
    ("_ps", ("servers, workers,", "coordinator")),
    ("_testing", ("rx.testing",)),
)
# The folders of the core from the top, what they are for, and the first letters of the paths through them.
CORE = (
    ("program_kit, diagnostics", "what _ps takes; messages", ""),
    ("keras", "fit, optimizers, callbacks", "f"),
    ("summaries, profiling, preemption", "TensorBoard; saves", ""),
    ("frameworks, checkpoint", "flax nnx; what is saved", ""),
    ("functions, strategies", "rx.function; run, reduce", "rs"),
    ("input", "datasets as steps", "f"),
    ("lowering", "programs on devices", "rf"),
    ("variables, scope, fault_tolerance, collectives", "state, context, sums", "rfs"),
    ("tracing", "a function becomes a program", "rfs"),
    ("values, devices", "what is placed, and where", "rfs"),
    ("status, cluster, control, wire", "processes, connections", "s"),
    ("user, jax_internals", "the user's code; JAX's version", ""),
    ("vocabulary, packaging, untrusted, drawing", "errors, options", ""),
)


def layers() -> None:
    picture = Picture(
        760, 650, "The parts beside the core, the folders of the core as layers, and three paths through them"
    )
    paths = (("r", "run", COLOURS[0]), ("f", "fit", COLOURS[1]), ("s", "schedule", COLOURS[2]))
    left, height, top = 498, 30, 176
    picture.text(24, 28, "Parts", bold=True)
    picture.text(
        736, 28, "a part may import the core; the core imports no part", size=12, fill=MUTED, anchor="end"
    )
    for number, (folder, lines) in enumerate(PARTS):
        x = 24 + number * 144
        picture.box(x, 38, 136, 68, "white", stroke=COLOURS[3])
        picture.text(x + 12, 59, folder, bold=True)
        for line, words in enumerate(lines):
            picture.text(x + 12, 78 + 16 * line, words, size=12, fill=MUTED)
        picture.line(x + 68, 107, x + 68, 136, arrow=True)
    picture.box(12, 138, 736, 500, INK, opacity=0.03, stroke=LINE)
    picture.text(24, 164, "The core, _src", bold=True)
    for column, (_, name, colour) in enumerate(paths):
        picture.text(left + 40 + 80 * column, 164, name, anchor="middle", bold=True, fill=colour)
    tops = [top + number * (height + 4) + (14 if number else 0) for number in range(len(CORE))]
    for number, ((folders, words, touched), y) in enumerate(zip(CORE, tops, strict=True)):
        picture.box(24, y, 712, height, "white", stroke=LINE if number else COLOURS[3], dashed=not number)
        picture.text(38, y + 20, folders, bold=True)
        picture.text(left - 6, y + 20, words, size=12, fill=MUTED, anchor="end")
        for column, (mark, _, colour) in enumerate(paths):
            if mark in touched:
                picture.box(left + 34 + 80 * column, y + 9, 12, 12, colour, radius=6)
    picture.text(left + 34, tops[0] + 20, "no file imports it", size=12, fill=MUTED)
    for x in (120, 180, 240):  # the layers report events
        picture.line(x, tops[1] - 1, x, tops[0] + height + 2, arrow=True, dashed=True)
    for column, (mark, _, _colour) in enumerate(paths):
        passed = [y for (_, _, touched), y in zip(CORE, tops, strict=True) if mark in touched]
        x = left + 40 + 80 * column
        for above, below in itertools.pairwise(passed):
            picture.line(x, above + 22, x, below + 8, arrow=True)
    picture.save("layers.svg")


if __name__ == "__main__":
    batch()
    variable()
    step()
    scheduled_function()
    layers()
