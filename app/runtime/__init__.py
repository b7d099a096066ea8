"""What every feature of the console stands on: child processes, errors, settings, and Streamlit's and Python's ways."""
