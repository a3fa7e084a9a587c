"""`specroll bench`: what speculation gains on this machine, measured side by side in one engine."""
