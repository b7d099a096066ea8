"""What a person may choose, and what is known of the machine: options, time-outs, faults on purpose, devices."""
