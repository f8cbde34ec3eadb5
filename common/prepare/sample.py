"""Alias for scripts written before 0.3: the same as `python -m extras.prepare.sample`."""

import runpy

runpy.run_module("extras.prepare.sample", run_name="__main__", alter_sys=True)
