"""What rows have in common that several processes measured: samples by two clocks, and which one leads."""

from typing import Any, Literal

from probes.shared.unknown import Unknown

Clock = Literal["device", "wall"]
Samples = tuple[float, ...]


class Repeated:
    """A case that several processes measured: `repeats` are what the later ones did."""

    device_s: Samples | Unknown
    wall_s: Samples
    repeats: tuple[Any, ...]

    @property
    def leading(self) -> Clock:
        """The clock behind the figure that is shown: the device's, the wall's where there is no other."""
        return "device" if isinstance(self.device_s, tuple) else "wall"

    @property
    def samples_s(self) -> Samples:
        """This process's samples by the leading clock, seconds per operation."""
        return self.device_s if isinstance(self.device_s, tuple) and self.leading == "device" else self.wall_s

    @property
    def times_s(self) -> tuple[Samples, ...]:
        """The samples by the leading clock, of each process."""
        return tuple(one.samples_s for one in (self, *self.repeats))

    @property
    def walls_s(self) -> tuple[Samples, ...]:
        """The samples by the wall clock, of each process."""
        return tuple(one.wall_s for one in (self, *self.repeats))
