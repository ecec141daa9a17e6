"""A small curve for the terminal, drawn with braille dots: two by four to a character."""

import math
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

_BLANK = 0x2800
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARGIN = 6
"""Columns of the axis labels: ' 100% ' and the axis itself."""


class Curve:
    """Accuracy over rounds, from the first to the last planned one, with a dotted line at the target."""

    def __init__(self, values: Sequence[float], rounds: int, target: float, height: int = 8) -> None:
        self._values = values
        self._rounds = max(rounds, 2)
        self._target = target
        self._height = max(height, 2)
        known = [v for v in values if not math.isnan(v)]
        self._low = math.floor(min(known, default=0.0) * 10) / 10
        self._high = min(1.0, math.ceil(max([*known, target], default=1.0) * 10 + 1e-9) / 10)
        self._high = max(self._high, self._low + 0.1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width - _MARGIN, 8)
        cells = self._draw(width)
        target_row = self._row(self._target) // 4
        for row, line in enumerate(cells):
            yield Text.assemble(self._label(row), self._line(line, dotted=row == target_row), no_wrap=True)
        axis = f"{'':>4} └" + "─" * width
        yield Text(axis, style="dim", no_wrap=True)
        first, last = "1", f"round {self._rounds}"
        yield Text(
            " " * _MARGIN + first + " " * max(width - len(first) - len(last), 1) + last,
            style="dim",
            no_wrap=True,
        )

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_MARGIN + 12, options.max_width)

    def _label(self, row: int) -> Text:
        if row == self._row(self._target) // 4:
            return Text(f"{100 * self._target:3.0f}% ┤", style="yellow")
        if row in (0, self._height - 1):
            text = f"{100 * (self._high if row == 0 else self._low):3.0f}%"
            return Text(f"{text} ┤", style="dim")
        return Text(f"{'':>4} │", style="dim")

    def _line(self, cells: Sequence[int], dotted: bool) -> Text:
        line = Text()
        for bits in cells:
            if bits:
                line.append(chr(_BLANK + bits), style="bold cyan")
            else:
                line.append("┈" if dotted else " ", style="yellow")
        return line

    def _row(self, value: float) -> int:
        share = (value - self._low) / (self._high - self._low)
        dots = 4 * self._height
        return min(max(round((1 - share) * (dots - 1)), 0), dots - 1)

    def _draw(self, width: int) -> list[list[int]]:
        cells = [[0] * width for _ in range(self._height)]
        points = [
            (round(index / (self._rounds - 1) * (2 * width - 1)), self._row(value))
            for index, value in enumerate(self._values[: self._rounds])
            if not math.isnan(value)
        ]
        for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
            steps = max(abs(x1 - x0), abs(y1 - y0), 1)
            for step in range(steps + 1):
                x, y = x0 + round((x1 - x0) * step / steps), y0 + round((y1 - y0) * step / steps)
                cells[y // 4][x // 2] |= _BITS[y % 4][x % 2]
        return cells
