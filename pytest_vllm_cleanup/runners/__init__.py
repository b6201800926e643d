"""What tests call: engines that are sure to be closed."""
