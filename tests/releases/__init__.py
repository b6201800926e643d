"""What each supported release of vLLM has of the things that the drain and the holders table rely on."""
