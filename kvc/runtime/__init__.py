"""What every service needs once: settings, logs, telemetry, metrics, the gRPC server and the process around it."""
