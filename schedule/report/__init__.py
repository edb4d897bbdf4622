"""Reports on schedules: rewrites, costs, tables, pages and drawings."""

from schedule.report.entries import Entry
from schedule.report.report import Report

__all__ = ["Entry", "Report"]
