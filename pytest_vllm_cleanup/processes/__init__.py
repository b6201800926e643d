"""Processes: which ones belong to an engine, how they are ended, and who does it when pytest is gone.

Everything here is standard library only, because the watchdog runs on it, and knows neither pytest nor vLLM.
"""
