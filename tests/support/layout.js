// What is wrong with the layout of a page, as texts; see layout.py.
async () => {
    // What follows the size of the window does so with the next frames.
    for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
    const found = [];
    const name = (element) => {
        const steps = [];
        for (let one = element; one && one !== document.body && steps.length < 4; one = one.parentElement) {
            steps.unshift(one.tagName.toLowerCase() + (one.id ? `#${one.id}` : "") + [...one.classList].map((c) => `.${c}`).join(""));
        }
        return `${steps.join(" > ")} "${(element.textContent || element.value || "").trim().replace(/\s+/g, " ").slice(0, 40)}"`;
    };
    const page = document.documentElement;
    if (page.scrollWidth > page.clientWidth) {
        found.push(`the page is ${page.scrollWidth - page.clientWidth} px wider than its window`);
        for (const element of document.body.querySelectorAll("*")) {
            const box = element.getBoundingClientRect();
            if (box.width && box.right > page.clientWidth + 1) found.push(`  reaches to ${Math.round(box.right)} px: ${name(element)}`);
        }
        found.splice(6);
    }
    const seen = (element) => {
        if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) return false;
        const box = element.getBoundingClientRect();
        return box.width > 1 && box.height > 1 && !element.closest(".visually-hidden");
    };
    // What the browser or Django scrolls on purpose: a text area, the sidebar, the list of a select box.
    const ignored = "textarea, select, option, input, #nav-sidebar, .u-legend, .u-wrap";
    for (const element of document.body.querySelectorAll("*")) {
        if (element.matches(ignored) || element.closest(ignored) || !seen(element)) continue;
        const style = getComputedStyle(element);
        if (style.display !== "inline" && style.overflowX !== "visible" && element.scrollWidth > element.clientWidth + 1) {
            found.push(`${element.scrollWidth - element.clientWidth} px hidden at the side: ${name(element)}`);
        }
        const hides = ["hidden", "clip"].includes(style.overflowY);
        if (hides && element.scrollHeight > element.clientHeight + 1) {
            found.push(`${element.scrollHeight - element.clientHeight} px hidden below: ${name(element)}`);
        }
    }
    // The rectangles of all texts and controls, as far as they are not scrolled out of sight.
    const clip = (box, element) => {
        let { left, top, right, bottom } = box;
        for (let one = element; one && one !== document.body; one = one.parentElement) {
            if (getComputedStyle(one).overflowY === "visible") continue;
            const around = one.getBoundingClientRect();
            left = Math.max(left, around.left); right = Math.min(right, around.right);
            top = Math.max(top, around.top); bottom = Math.min(bottom, around.bottom);
        }
        return right - left > 1 && bottom - top > 1 ? { left, top, right, bottom } : null;
    };
    const pieces = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const range = document.createRange();
    while (walker.nextNode()) {
        const node = walker.currentNode, parent = node.parentElement;
        if (!node.data.trim() || parent.closest("script, style, noscript, option, textarea, .u-legend") || !seen(parent)) continue;
        range.selectNodeContents(node);
        const boxes = [...range.getClientRects()].filter((box) => box.width > 1);
        const length = node.data.trim().length;
        if (!parent.closest("pre") && boxes.length > 3 && length / boxes.length < 5) found.push(`broken into ${boxes.length} lines: ${name(parent)}`);
        for (const box of boxes) {
            const rest = clip(box, parent);
            if (rest) pieces.push({ ...rest, element: parent, node });
        }
    }
    for (const element of document.body.querySelectorAll("canvas, button, a.button, input:not([type=hidden]), select, textarea")) {
        const rest = seen(element) && clip(element.getBoundingClientRect(), element);
        if (rest) pieces.push({ ...rest, element, node: element });
    }
    pieces.sort((one, other) => one.top - other.top);
    const listed = new Set();
    pieces.forEach((one, index) => {
        for (let next = index + 1; next < pieces.length && pieces[next].top < one.bottom - 3; next++) {
            const other = pieces[next];
            if (one.node === other.node || one.element.contains(other.element) || other.element.contains(one.element)) continue;
            const width = Math.min(one.right, other.right) - Math.max(one.left, other.left);
            const height = Math.min(one.bottom, other.bottom) - other.top;
            if (width > 2 && height > 3) {
                const words = `covers: ${name(one.element)} and ${name(other.element)}`;
                if (!listed.has(words)) found.push(words);
                listed.add(words);
            }
        }
    });
    return found;
}
