"""On-policy data: the target writes the assistant turns of stage 01, and the prompts too where there are none."""
