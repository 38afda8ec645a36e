//! The figures as a chart: one panel for each section, with a bar for each setup.

use askama::Template;

use super::table::number;
use crate::scenarios::compare::figures::{Case, Column, Row};

/// Colours of setups, in the order of their first appearance. The first eight are distinguishable
/// with colour blindness (Okabe and Ito).
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
/// Longest bar in multiples of the product's, so that one slow setup does not hide the differences
/// of the others.
const LONGEST: f64 = 4.0;

#[derive(Template)]
#[template(path = "chart.svg", escape = "html")]
struct Chart<'a> {
    width: usize,
    height: usize,
    left: usize,
    legend: Vec<Entry<'a>>,
    /// Place of the line below the legend.
    explanation: usize,
    panels: Vec<Panel<'a>>,
}

/// A setup in the legend.
struct Entry<'a> {
    x: usize,
    y: usize,
    fill: &'static str,
    setup: &'a str,
}

/// Cases of one section and headline.
struct Panel<'a> {
    left: usize,
    top: usize,
    width: usize,
    title: String,
    groups: Vec<Group<'a>>,
}

/// The bars of a case.
struct Group<'a> {
    middle: usize,
    name: &'a str,
    bars: Vec<Bar>,
}

/// A setup's bar, with its value above it.
struct Bar {
    middle: f64,
    above: f64,
    value: String,
    parts: Vec<Rectangle>,
}

struct Rectangle {
    x: f64,
    y: f64,
    width: f64,
    height: f64,
    fill: &'static str,
    opacity: f64,
}

/// Draws all cases. Cases of one section and headline share a panel.
pub(crate) fn chart(cases: &[Case]) -> Result<String, askama::Error> {
    let mut setups: Vec<&str> = Vec::new();
    for row in cases.iter().flat_map(|case| &case.rows) {
        if !setups.contains(&row.setup.as_str()) {
            setups.push(&row.setup);
        }
    }
    let per_line = (WIDTH - 2 * MARGIN) / LEGEND_STEP;
    let entry = |(index, &setup)| Entry {
        x: MARGIN + index % per_line * LEGEND_STEP,
        y: MARGIN + index / per_line * LEGEND_LINE,
        fill: colour(&setups, setup),
        setup,
    };
    let explanation = MARGIN + setups.len().div_ceil(per_line) * LEGEND_LINE;
    let mut left = MARGIN;
    let mut top = explanation + LEGEND_LINE;
    let mut panels = Vec::new();
    for cases in cases
        .chunk_by(|a, b| a.section == b.section && a.headline == b.headline && a.work == b.work)
    {
        let width = width(cases);
        if left > MARGIN && left + width > WIDTH - MARGIN {
            left = MARGIN;
            top += PANEL_HEIGHT;
        }
        panels.extend(Panel::new(left, top, cases, &setups));
        left += width + MARGIN;
    }
    let chart = Chart {
        width: WIDTH,
        height: top + PANEL_HEIGHT,
        left: MARGIN,
        legend: setups.iter().enumerate().map(entry).collect(),
        explanation,
        panels,
    };
    chart.render()
}

fn colour(setups: &[&str], setup: &str) -> &'static str {
    let index = setups
        .iter()
        .position(|known| *known == setup)
        .unwrap_or_default();
    COLOURS[index % COLOURS.len()]
}

fn width(cases: &[Case]) -> usize {
    (cases.iter().map(slots).sum::<usize>() * SLOT).max(PANEL_MIN)
}

/// Width of a case in slots, with the distance to the next: enough for its bars and for its name.
fn slots(case: &Case) -> usize {
    (case.rows.len() + 1).max((case.name.chars().count() * LETTER).div_ceil(SLOT) + 1)
}

impl<'a> Panel<'a> {
    fn new(left: usize, top: usize, cases: &'a [Case], setups: &[&str]) -> Option<Self> {
        let first = cases.first()?;
        let headlines = cases
            .iter()
            .flat_map(|case| case.rows.iter().filter_map(|row| row.median(case.headline)));
        let products = cases
            .iter()
            .filter_map(|case| case.rows.first()?.median(case.headline));
        let longest = headlines
            .fold(0.0, f64::max)
            .min(LONGEST * products.fold(0.0, f64::max));
        let mut panel = Self {
            left,
            top,
            width: width(cases),
            title: format!("{}: {}", first.section, quantity(first)),
            groups: Vec::with_capacity(cases.len()),
        };
        let base = panel.base() as f64;
        let mut left = left;
        for case in cases {
            let width = slots(case) * SLOT;
            let first = left + (width - case.rows.len() * SLOT) / 2;
            let bar = |(index, row): (usize, &Row)| {
                let x = (first + index * SLOT) as f64;
                Bar::new(x, base, longest, case, row, colour(setups, &row.setup))
            };
            panel.groups.push(Group {
                middle: left + width / 2,
                name: &case.name,
                bars: case.rows.iter().enumerate().filter_map(bar).collect(),
            });
            left += width;
        }
        Some(panel)
    }

    /// Where the bars begin.
    fn base(&self) -> usize {
        self.top + BASE
    }
}

impl Bar {
    /// A bar at `x` above `base`; `longest` is the value of the longest bar. `None` without a
    /// value.
    fn new(
        x: f64,
        base: f64,
        longest: f64,
        case: &Case,
        row: &Row,
        fill: &'static str,
    ) -> Option<Self> {
        let value = row.median(case.headline)?;
        let width = SLOT as f64 * 0.85;
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
            .filter(|_| case.headline == Column::Cpu)
            .map(height);
        let solid = |height, opacity| Rectangle {
            x,
            y: base - height,
            width,
            height,
            fill,
            opacity,
        };
        let mut parts = vec![solid(full, if dark.is_some() { 0.55 } else { 1.0 })];
        parts.extend(dark.map(|height| solid(height, 1.0)));
        if value > longest {
            parts.push(Rectangle {
                x: x - 1.0,
                y: base - 0.9 * full,
                width: width + 2.0,
                height: 4.0,
                fill: "#fff",
                opacity: 1.0,
            });
        }
        Some(Self {
            middle: x + width / 2.0,
            above: base - full - 4.0,
            value: number(value),
            parts,
        })
    }
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
        Column::Calls => "system calls per request".to_owned(),
        Column::Sleeps => "sleeps per request".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::compare::figures::{Sample, example};

    #[test]
    fn charts_have_a_panel_for_each_section_and_bars_for_each_setup() {
        let svg = chart(&example()).unwrap();
        assert!(svg.contains("http1: CPU time, µs/request") && svg.contains("idle: memory, bytes"));
        assert!(svg.contains("a &#60;caller&#62;") && !svg.contains("<caller>"));
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
        let uncut = chart(&cases).unwrap().matches("<rect").count();
        cases[0].rows[1].rounds = vec![Sample::default().with(Column::Cpu, 1000.0)];
        let svg = chart(&cases).unwrap();
        // The part of the kernel is unknown, and a gap is added.
        assert_eq!(svg.matches("<rect").count(), uncut);
        assert!(
            svg.contains(">1000<")
                && svg.contains("height=\"140.0\"")
                && !svg.contains("height=\"14000")
        );
    }
}
