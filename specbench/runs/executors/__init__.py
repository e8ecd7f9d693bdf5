"""Where images are decoded: in this process, or by workers on one machine or many. The runner alone writes."""
