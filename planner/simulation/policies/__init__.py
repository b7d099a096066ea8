"""`published` play measured tables; `planned_policies` plan with a job's profile."""
