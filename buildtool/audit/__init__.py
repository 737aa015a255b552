"""Reads images without extracting them and reports where their bytes are."""

from buildtool.audit.audit import audit_image, audit_path, write_reports
from buildtool.audit.report.schema import AuditReport

__all__ = ["AuditReport", "audit_image", "audit_path", "write_reports"]
