from django.contrib import admin

from demo_shop.shipments.models import Shipment

admin.site.register(Shipment)
