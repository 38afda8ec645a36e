//! The figures as a chart: one panel for each section, with a bar for each setup.

use std::fmt::Write;

use super::figures::{Case, Column, Row};
use super::table::number;

/// Colours of setups, in the order of their first appearance. The first eight are distinguishable with colour blindness
/// (Okabe and Ito).
const COLOURS: [&str; 9] = [
    "#0072b2", "#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#999999", "#b8a800",
    "#333333",
];
const WIDTH: usize = 960;
const MARGIN: usize = 20;
const LEGEND_STEP: usize = 150;
const LEGEND_LINE: usize = 20;
/// Distance between two bars. One bar is left out between two cases.
const SLOT: usize = 33;
/// Width of a letter in the names of cases, rounded up.
const LETTER: usize = 6;
const PANEL_HEIGHT: usize = 220;
/// Narrowest panel, for its title.
const PANEL_MIN: usize = 290;
/// Height of the longest bar, below the title and above the names of the cases.
const BAR_MAX: f64 = 140.0;
const BASE: usize = 185;
/// Longest bar in multiples of the product's, so that one slow setup does not hide the differences of the others.
const LONGEST: f64 = 4.0;

/// Draws all cases. Cases of one section and headline share a panel.
pub(super) fn chart(cases: &[Case]) -> String {
    let mut setups: Vec<&str> = Vec::new();
    for row in cases.iter().flat_map(|case| &case.rows) {
        if !setups.contains(&row.setup) {
            setups.push(row.setup);
        }
    }
    let mut body = String::new();
    let mut left = MARGIN;
    let mut top = legend(&mut body, &setups);
    for cases in cases
        .chunk_by(|a, b| a.section == b.section && a.headline == b.headline && a.work == b.work)
    {
        let width = width(cases);
        if left > MARGIN && left + width > WIDTH - MARGIN {
            (left, top) = (MARGIN, top + PANEL_HEIGHT);
        }
        panel(&mut body, [left, top], cases, &setups);
        left += width + MARGIN;
    }
    let height = top + PANEL_HEIGHT;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n\
         {body}</svg>\n"
    )
}

fn colour(setups: &[&str], setup: &str) -> &'static str {
    let index = setups
        .iter()
        .position(|known| *known == setup)
        .unwrap_or_default();
    COLOURS[index % COLOURS.len()]
}

/// Draws the legend and returns its height.
fn legend(svg: &mut String, setups: &[&str]) -> usize {
    let per_line = (WIDTH - 2 * MARGIN) / LEGEND_STEP;
    for (index, setup) in setups.iter().enumerate() {
        let x = MARGIN + index % per_line * LEGEND_STEP;
        let y = MARGIN + index / per_line * LEGEND_LINE;
        let fill = colour(setups, setup);
        line(
            svg,
            format_args!(
                "<rect x=\"{x}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{fill}\"/>",
                y - 10
            ),
        );
        line(
            svg,
            format_args!("<text x=\"{}\" y=\"{y}\">{}</text>", x + 17, escaped(setup)),
        );
    }
    let explanation = "Shorter is better. CPU time: dark in the kernel, light in user space. A bar with a gap is cut off.";
    let y = MARGIN + setups.len().div_ceil(per_line) * LEGEND_LINE;
    line(
        svg,
        format_args!("<text x=\"{MARGIN}\" y=\"{y}\" fill=\"#555\">{explanation}</text>"),
    );
    y + LEGEND_LINE
}

fn width(cases: &[Case]) -> usize {
    (cases.iter().map(slots).sum::<usize>() * SLOT).max(PANEL_MIN)
}

/// Width of a case in slots, with the distance to the next: enough for its bars and for its name.
fn slots(case: &Case) -> usize {
    (case.rows.len() + 1).max((case.name.chars().count() * LETTER).div_ceil(SLOT) + 1)
}

fn panel(svg: &mut String, [left, top]: [usize; 2], cases: &[Case], setups: &[&str]) {
    let Some(first) = cases.first() else { return };
    let title = format!("{}: {}", first.section, quantity(first));
    line(
        svg,
        format_args!(
            "<text x=\"{left}\" y=\"{}\" font-size=\"14\">{}</text>",
            top + 16,
            escaped(&title)
        ),
    );
    let base = top + BASE;
    line(
        svg,
        format_args!(
            "<path d=\"M{left} {base}h{}\" stroke=\"#888\"/>",
            width(cases)
        ),
    );
    let headlines = cases
        .iter()
        .flat_map(|case| case.rows.iter().filter_map(|row| row.median(case.headline)));
    let products = cases
        .iter()
        .filter_map(|case| case.rows.first()?.median(case.headline));
    let longest = headlines
        .fold(0.0, f64::max)
        .min(LONGEST * products.fold(0.0, f64::max));
    let mut left = left;
    for case in cases {
        let width = slots(case) * SLOT;
        let first = left + (width - case.rows.len() * SLOT) / 2;
        for (index, row) in case.rows.iter().enumerate() {
            let x = (first + index * SLOT) as f64;
            let width = SLOT as f64 * 0.85;
            Bar {
                x,
                base: base as f64,
                width,
                longest,
            }
            .draw(svg, case, row, colour(setups, row.setup));
        }
        let middle = left + width / 2;
        let name = escaped(&case.name);
        line(
            svg,
            format_args!(
                "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{name}</text>",
                base + 16
            ),
        );
        left += width;
    }
}

/// Place and scale of one bar.
struct Bar {
    x: f64,
    base: f64,
    width: f64,
    longest: f64,
}

impl Bar {
    fn draw(&self, svg: &mut String, case: &Case, row: &Row, fill: &str) {
        let Some(value) = row.median(case.headline) else {
            return;
        };
        let Self {
            x,
            base,
            width,
            longest,
        } = *self;
        let height = |value: f64| {
            if longest > 0.0 {
                (value / longest).min(1.0) * BAR_MAX
            } else {
                0.0
            }
        };
        let full = height(value);
        let dark = row
            .median(Column::Kernel)
            .filter(|_| case.headline == Column::Cpu);
        let opacity = if dark.is_some() { 0.55 } else { 1.0 };
        rectangle(svg, [x, base - full, width, full], fill, opacity);
        if let Some(kernel) = dark {
            let kernel = height(kernel);
            rectangle(svg, [x, base - kernel, width, kernel], fill, 1.0);
        }
        if value > longest {
            rectangle(
                svg,
                [x - 1.0, base - 0.9 * full, width + 2.0, 4.0],
                "#fff",
                1.0,
            );
        }
        let middle = x + width / 2.0;
        let y = base - full - 4.0;
        line(
            svg,
            format_args!(
                "<text x=\"{middle:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" font-size=\"9\">{}</text>",
                number(value)
            ),
        );
    }
}

fn rectangle(svg: &mut String, [x, y, width, height]: [f64; 4], fill: &str, opacity: f64) {
    line(
        svg,
        format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\" opacity=\"{opacity}\"/>"
        ),
    );
}

/// The headline of a case with its unit.
fn quantity(case: &Case) -> String {
    match case.headline {
        Column::Cpu | Column::User | Column::Kernel => {
            format!("CPU time, {}", case.work.cpu_unit())
        }
        Column::Rate => case.work.rate_unit().to_owned(),
        Column::P50 => "median latency, ms".to_owned(),
        Column::P99 => "99th percentile of latency, ms".to_owned(),
        Column::P999 => "99.9th percentile of latency, ms".to_owned(),
        Column::Bytes => "memory, bytes".to_owned(),
    }
}

fn line(svg: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(svg, "{line}");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::figures::{Sample, example};

    #[test]
    fn charts_have_a_panel_for_each_section_and_bars_for_each_setup() {
        let svg = chart(&example());
        assert!(svg.contains("http1: CPU time, µs/request") && svg.contains("idle: memory, bytes"));
        assert!(svg.contains("a &lt;caller&gt;") && !svg.contains("<caller>"));
        // Background, two in the legend, two parts of both bars of CPU time, one bar of memory.
        assert_eq!(svg.matches("<rect").count(), 1 + 2 + 4 + 1);
        // Both panels fit beside each other, below two lines of the legend.
        assert!(
            svg.contains(&format!("viewBox=\"0 0 {WIDTH} {}\"", 60 + PANEL_HEIGHT)),
            "{svg}"
        );
    }

    #[test]
    fn a_bar_far_longer_than_the_product_s_is_cut_off() {
        let mut cases = example();
        cases.truncate(1);
        let uncut = chart(&cases).matches("<rect").count();
        cases[0].rows[1].rounds = vec![Sample::default().with(Column::Cpu, 1000.0)];
        let svg = chart(&cases);
        // The part of the kernel is unknown, and a gap is added.
        assert_eq!(svg.matches("<rect").count(), uncut);
        assert!(
            svg.contains(">1000<")
                && svg.contains("height=\"140.0\"")
                && !svg.contains("height=\"14000")
        );
    }
}
