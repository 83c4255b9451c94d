"""Write docs/playground.html: schedules side by side, as one file for any browser."""

from pathlib import Path

from megatron.fold3d.observe.report.playground import Settings, playground

PLAYGROUND = Path(__file__).parents[1] / "docs/playground.html"


def main() -> None:
    """Write the page."""
    PLAYGROUND.write_text(playground(Settings()), encoding="utf-8")


if __name__ == "__main__":
    main()
