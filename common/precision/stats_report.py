"""Alias for scripts written before 0.3: the same as `python -m extras.quant_stats.report`."""

import runpy

runpy.run_module("extras.quant_stats.report", run_name="__main__", alter_sys=True)
