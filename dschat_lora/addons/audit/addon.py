"""Filters of rows: near duplicates, contamination, languages."""

from dschat_lora.config.addons import Addon

ADDON = Addon("audit", options={"audit": "dschat_lora.addons.audit.config:FilterConfig"})
