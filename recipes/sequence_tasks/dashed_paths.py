"""Images of dashed paths; the class says whether two discs lie at the ends of one path.

The task and its layout follow Pathfinder (Linsley et al., 2018), but the images are not those of the Long Range Arena,
and accuracies on one say nothing about the other. An image has two long paths and a few short ones, which do not touch.
If the discs are joined, they are at the two ends of one long path; if not, they are at ends of two long paths. An image
is kept only if the other choice of ends is as far apart, so that the distance of the discs does not give away the
answer.
"""

import math
import random
from collections.abc import Iterator
from itertools import pairwise

from PIL import Image, ImageDraw

from hf_graphfilter import GraphFilterError

Path = list[tuple[float, float]]  # where its dashes begin, and the end of the last

# in thirty-seconds of the side
STEP, DASH, WIDTH, RADIUS, MARGIN, CLEARANCE, ALIKE = 3.0, 2.0, 0.9, 1.6, 2.0, 3.0, 1.0
BEND = 0.5  # radians from dash to dash, at most
FINE = 4  # times finer is what is drawn, then averaged
TRIES = 2000  # of one image


class DashedPaths:
    """Square grey images with two long paths of ``dashes`` and ``distractors`` paths of a third of it."""

    def __init__(self, size: int = 32, dashes: int = 9, distractors: int = 3):
        self.size, self.dashes, self.distractors = size, dashes, distractors

    def generate(self, count: int, seed: int) -> Iterator[tuple[Image.Image, int]]:
        """Images and whether the discs are joined, every other one."""
        for number in range(count):
            draw = random.Random(f"{seed} {number}")
            yield self.image(draw, joined := number % 2), joined

    def image(self, draw: random.Random, joined: int) -> Image.Image:
        paths, *pairs = self.layout(draw)
        ends = pairs[joined]
        scale = FINE * self.size / 32
        canvas = Image.new("L", (FINE * self.size, FINE * self.size))
        pen = ImageDraw.Draw(canvas)
        for path in paths:
            for (x, y), (u, v) in pairwise(path):
                dash_end = x + (u - x) * DASH / STEP, y + (v - y) * DASH / STEP
                pen.line([scale * x, scale * y, *(scale * z for z in dash_end)], fill=255, width=round(scale * WIDTH))
        for x, y in ends:
            pen.circle((scale * x, scale * y), scale * RADIUS, fill=255)
        return canvas.resize((self.size, self.size), Image.Resampling.BOX)

    def layout(self, draw: random.Random) -> tuple[list[Path], Path, Path]:
        """All paths of an image, and where discs are apart and joined."""
        for _ in range(TRIES):
            first, second, *distractors = self.paths(draw)
            joined = [first[0], first[-1]]
            pairs = [[a, b] for a in joined for b in (second[0], second[-1])]
            apart = min(pairs, key=lambda pair: abs(math.dist(*pair) - math.dist(*joined)))
            if abs(math.dist(*apart) - math.dist(*joined)) <= ALIKE:
                return [first, second, *distractors], apart, joined
        raise self.make_error()

    def paths(self, draw: random.Random) -> list[Path]:
        """Paths that fit an image, the two long ones first."""
        lengths = [self.dashes] * 2 + [max(1, self.dashes // 3)] * self.distractors
        for _ in range(TRIES):
            paths: list[Path] = []
            for length in lengths:
                points = [point for path in paths for point in path]
                path = next(filter(None, (self.path(draw, length, points) for _ in range(20))), None)
                if path is None:
                    break
                paths.append(path)
            else:
                return paths
        raise self.make_error()

    def make_error(self) -> GraphFilterError:
        return GraphFilterError(
            f"two paths of {self.dashes} dashes and {self.distractors} shorter ones do not fit an image: take fewer"
        )

    @staticmethod
    def path(draw: random.Random, length: int, taken: Path) -> Path | None:
        """Return a path that keeps clear of what is taken and of itself, if this attempt finds one."""

        def is_free(point: tuple[float, float], earlier_points: Path) -> bool:
            inside = all(MARGIN <= z <= 32 - MARGIN for z in point)
            return inside and all(math.dist(point, other) >= CLEARANCE for other in (*taken, *earlier_points))

        path = [(draw.uniform(MARGIN, 32 - MARGIN), draw.uniform(MARGIN, 32 - MARGIN))]
        if not is_free(path[0], []):
            return None
        heading = draw.uniform(0, 2 * math.pi)
        while len(path) <= length:
            for _ in range(8):
                turned = heading + draw.uniform(-BEND, BEND)
                point = path[-1][0] + STEP * math.cos(turned), path[-1][1] + STEP * math.sin(turned)
                if is_free(point, path[:-1]):
                    heading = turned
                    path.append(point)
                    break
            else:
                return None
        return path
