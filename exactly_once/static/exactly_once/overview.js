// Refreshes the figures of the overview and draws its charts.
"use strict";
document.addEventListener("DOMContentLoaded", function () {
    const FIGURES_MS = 5000, CHARTS_MS = 60000, HEIGHT = 180;
    const root = document.getElementById("overview");
    if (!root) return;
    const stale = document.getElementById("overview-stale");
    const buttons = [...root.querySelectorAll("[data-range]")];
    let range = "hour", data = {}, charts = [], plots = [], chartsAt = -Infinity, isLoading = false;

    function color(name) {
        return getComputedStyle(root).getPropertyValue(name).trim();
    }

    function clock(seconds) {
        return new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    }

    // An axis has room for six characters: 1,250,000 is 1.25M.
    function brief(number) {
        return number.toLocaleString([], { notation: "compact", maximumSignificantDigits: 4 });
    }

    function axis(values) {
        const line = { stroke: color("--overview-grid"), width: 1 };
        return { stroke: color("--overview-text"), grid: line, ticks: line, values: values, size: 54 };
    }

    function series(label, index) {
        const stroke = color("--overview-" + (index + 1));
        const value = (plot, number) => (number === null || number === undefined ? "-" : number.toLocaleString());
        const points = { show: false, filter: alone, size: 4, fill: stroke };
        return { label: label, stroke: stroke, width: 2, points: points, value: value, spanGaps: false };
    }

    // A value between two gaps is no line, so it is drawn as a point.
    function alone(plot, index) {
        const known = plot.data[index].map((number) => number !== null && number !== undefined);
        return known.flatMap((is, at) => (is && !known[at - 1] && !known[at + 1] ? [at] : []));
    }

    function frame(place, chart) {
        const figure = document.createElement("figure"), title = document.createElement("figcaption");
        title.textContent = chart.title;
        figure.append(title);
        place.append(figure);
        return figure;
    }

    function draw(figure, chart) {
        if (!chart.times.length) {
            const unknown = document.createElement("p");
            unknown.className = "overview-quiet";
            unknown.textContent = root.dataset.unknown;
            figure.append(unknown);
            return;
        }
        const options = {
            width: figure.clientWidth,
            height: HEIGHT,
            padding: [8, 28, 0, 0],
            legend: { live: true },
            cursor: { drag: { setScale: false } },
            scales: { y: { range: (plot, low, high) => [0, high > 0 ? 1.1 * high : 1] } },
            axes: [
                axis((plot, splits) => splits.map(clock)),
                axis((plot, splits) => splits.map(brief)),
            ],
            series: [{ label: root.dataset.time, value: (plot, seconds) => (seconds ? clock(seconds) : "-") }, ...chart.series.map((one, index) => series(one.label, index))],
        };
        options.axes[0].size = 30;
        options.axes[0].space = 80;
        const plot = new uPlot(options, [chart.times, ...chart.series.map((one) => one.values)], figure);
        plots.push({ plot: plot, figure: figure });
    }

    function drawAll() {
        plots.forEach((one) => one.plot.destroy());
        plots = [];
        const place = root.querySelector("[data-charts]");
        place.replaceChildren();
        // All figures are placed before the first is drawn, because each takes part of the width.
        const figures = charts.map((chart) => frame(place, chart));
        charts.forEach((chart, index) => draw(figures[index], chart));
    }

    function fill() {
        for (const place of root.querySelectorAll("[data-part]")) {
            // A link that has the focus must not vanish under the keyboard.
            if (!place.contains(document.activeElement)) place.innerHTML = data[place.dataset.part];
        }
    }

    async function load() {
        if (isLoading || document.hidden) return;
        isLoading = true;
        const withCharts = performance.now() - chartsAt >= CHARTS_MS, wanted = range;
        try {
            const response = await fetch(root.dataset.url + (withCharts ? "?charts=" + wanted : ""), { redirect: "error" });
            if (!response.ok) throw new Error(response.statusText);
            data = await response.json();
            stale.hidden = true;
            fill();
            if (withCharts && wanted === range) {
                chartsAt = performance.now();
                charts = data.charts;
                drawAll();
            }
        } catch (error) {
            stale.hidden = false;
        } finally {
            isLoading = false;
        }
        if (wanted !== range) load();
    }

    function choose(button) {
        range = button.dataset.range;
        buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
        chartsAt = -Infinity;
        load();
    }

    buttons.forEach((button) => button.addEventListener("click", () => choose(button)));
    new MutationObserver(drawAll).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    document.addEventListener("visibilitychange", load);
    // The window is resized, or the sidebar is opened or closed.
    new ResizeObserver(() => plots.forEach((one) => one.plot.setSize({ width: one.figure.clientWidth, height: HEIGHT }))).observe(root);
    setInterval(load, FIGURES_MS);
    load();
});
