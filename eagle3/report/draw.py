"""Plots as inline SVG: lines and histograms, in the colours of the page."""

import math
from collections.abc import Sequence

from eagle3.report.markup import Markup, tag

WIDTH, HEIGHT = 420, 240  # of the view box: text stays readable where the figure fills a phone's width
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 10, 38
COLOURS = 8  # classes s0 .. s7 of the page
MOST_POINTS = 200  # of a line; beyond, each stands for the mean of several
DOTS_BELOW = 12  # points that are marked and tell their value

Point = tuple[float, float]


def thinned(points: Sequence[Point]) -> tuple[list[Point], int]:
    """At most MOST_POINTS points, means of so many neighbours each; and that number."""
    size = -(-len(points) // MOST_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [tuple(sum(values) / len(group) for values in zip(*group, strict=True)) for group in groups], size


def lines(
    series: dict[str, Sequence[Point]], title: str, x_label: str, y_label: str, *, log_x: bool = False, note: str = ""
) -> Markup:
    """A figure of one line a series, points (x, y) in ascending x; what is not finite is left out.

    The y axis is logarithmic where positive values span more than a factor of 20.
    """
    drawn, size = {}, 1
    for name, points in series.items():
        finite = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        if finite:
            drawn[name], one = thinned(finite)
            size = max(size, one)
    if not drawn:
        return tag("p", f"{title}: nothing recorded.", class_="absent")
    ys = [y for points in drawn.values() for _, y in points]
    x_axis = _Axis([x for points in drawn.values() for x, _ in points], LEFT, WIDTH - RIGHT, log_x)
    y_axis = _Axis(ys, HEIGHT - BOTTOM, TOP, min(ys) > 0 and max(ys) > 20 * min(ys))
    parts = [*_frame(x_axis, y_axis, x_label, y_label)]
    for number, (name, points) in enumerate(drawn.items()):
        colour = f"s{number % COLOURS}"
        places = [(x_axis.place(x), y_axis.place(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(tag("polyline", points=path, class_=f"line {colour}"))
        if len(points) < DOTS_BELOW:
            for (x, y), (at, height) in zip(points, places, strict=True):
                said = tag("title", f"{name}: {_number(y)} at {_number(x)}")
                parts.append(tag("circle", said, cx=f"{at:.1f}", cy=f"{height:.1f}", r=3, class_=f"dot {colour}"))
    legend = [
        tag("span", tag("i", class_=f"key s{number % COLOURS}"), name, class_="entry")
        for number, name in enumerate(drawn)
    ]
    notes = [part for part in (note, f"means of {size} a point" if size > 1 else "") if part]
    return _figure(title, parts, legend if len(drawn) > 1 else [], "; ".join(notes))


def histogram(values: Sequence[float], title: str, x_label: str, y_label: str) -> Markup:
    """A figure of how many values fall into 20 bins of equal width."""
    if not values:
        return tag("p", f"{title}: nothing recorded.", class_="absent")
    low, high = min(values), max(values)
    width = max(1.0, (high - low) / 20)
    counts = [0] * (min(20, math.floor((high - low) / width) + 1))
    for value in values:
        counts[min(len(counts) - 1, int((value - low) / width))] += 1
    x_axis = _Axis([low, low + width * len(counts)], LEFT, WIDTH - RIGHT, False)
    y_axis = _Axis([0, max(counts)], HEIGHT - BOTTOM, TOP, False)
    parts = [*_frame(x_axis, y_axis, x_label, y_label)]
    for number, count in enumerate(counts):
        left, right = x_axis.place(low + number * width), x_axis.place(low + (number + 1) * width)
        top = y_axis.place(count)
        said = tag("title", f"{_number(low + number * width)} to {_number(low + (number + 1) * width)}: {count:,}")
        size = {"width": f"{max(right - left - 1, 0.5):.1f}", "height": f"{y_axis.start - top:.1f}"}
        parts.append(tag("rect", said, x=f"{left:.1f}", y=f"{top:.1f}", **size, class_="bar"))
    return _figure(title, parts, [], "")


class _Axis:
    """Values to places between `start` and `end`, with round ticks."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool) -> None:
        self.start, self.end, self.log = start, end, log
        low, high = min(values), max(values)
        if log:
            self.ticks = _log_ticks(low, high)
            self.low, self.high = math.log(min(low, self.ticks[0])), math.log(max(high, self.ticks[-1]))
        else:
            if low == high:
                low, high = low - (abs(low) or 1) / 20, high + (abs(high) or 1) / 20
            self.ticks = _ticks(low, high, whole=all(value == int(value) for value in values))
            self.low, self.high = min(low, self.ticks[0]), max(high, self.ticks[-1])
        if self.low == self.high:
            self.low, self.high = self.low - 1, self.high + 1

    def place(self, value: float) -> float:
        value = math.log(value) if self.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _ticks(low: float, high: float, whole: bool) -> list[float]:
    """Some round numbers from `low` to `high`; only integers for `whole` values."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    step = max(1, math.ceil(step)) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low, high]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) < 4 else (1,)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if low <= tick <= high] or [low, high]


def _frame(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str) -> list[Markup]:
    """Grid, tick labels and names of both axes."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick, shown in zip(y_axis.ticks, _numbers(y_axis.ticks), strict=True):
        y = f"{y_axis.place(tick):.1f}"
        parts.append(tag("line", x1=LEFT, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", shown, x=LEFT - 5, y=y, dy="0.35em", class_="tick end"))
    ticks = x_axis.ticks if len(x_axis.ticks) < 7 else x_axis.ticks[::2]
    for tick, shown in zip(ticks, _numbers(ticks), strict=True):
        parts.append(tag("text", shown, x=f"{x_axis.place(tick):.1f}", y=bottom + 14, class_="tick middle"))
    parts.append(tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(tag("text", x_label, x=(LEFT + right) / 2, y=HEIGHT - 7, class_="label middle"))
    middle = (TOP + bottom) / 2
    turned = f"rotate(-90 10 {middle})"
    parts.append(tag("text", y_label, x=10, y=middle, dy="0.35em", transform=turned, class_="label middle"))
    return parts


def _figure(title: str, parts: list[Markup], legend: list[Markup], note: str) -> Markup:
    drawing = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)
    below = tag("div", *legend, class_="legend") if legend else ""
    said = tag("p", note, class_="note") if note else ""
    return tag("figure", tag("figcaption", title), drawing, below, said)


def _numbers(values: Sequence[float]) -> list[str]:
    """With as many digits as tell them apart."""
    for digits in range(4, 9):
        shown = [_number(value, digits) for value in values]
        if len(set(shown)) == len(shown):
            break
    return shown


def _number(value: float, digits: int = 4) -> str:
    """Short: 12k, 3.4M, 0.00012."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.{digits}g}{unit}"
    return f"{value:.{digits}g}"
