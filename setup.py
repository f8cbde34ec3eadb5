"""What pyproject.toml cannot say: the wheel has the scripts of this folder, for the commands of extras/commands.py.

Setuptools takes modules only, and 0.download_data.py is none.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SCRIPTS = sorted(path.name for path in Path(__file__).parent.glob("*.py") if path.name not in ("setup.py", "train.py"))


class BuildWithScripts(build_py):
    def build_packages(self) -> None:
        super().build_packages()
        for name in SCRIPTS:
            self.build_module(name.removesuffix(".py"), name, "extras.scripts")


setup(cmdclass={"build_py": BuildWithScripts})
