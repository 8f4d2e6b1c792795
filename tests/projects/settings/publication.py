"""A publication `FOR ALL TABLES`, for change data capture or a replica of another version"""

from tests.projects.settings.plain import *

before = "CREATE PUBLICATION everything FOR ALL TABLES"
