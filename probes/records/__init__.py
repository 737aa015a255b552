"""What a report holds: records as dataclasses, their JSON form, their statistics."""
