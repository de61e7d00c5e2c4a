"""What runs in the serving process: engine, model, Harmony, the OpenAI gateway, the launcher."""
