"""The wire contract, gRPC and HTTP clients, the command line, benchmark and cost report; never imports torch."""
