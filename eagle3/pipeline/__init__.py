"""The orchestrator behind run_pipeline.sh: settings, plan, preflight, state, and the process that runs the stages."""
