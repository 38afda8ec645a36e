//! The figures as JSON.

use serde_json::{Map, Value, json};

use crate::scenarios::compare::figures::{Case, Column, Row};
use crate::scenarios::compare::programs::Versions;

/// All cases, with median, lowest and highest value of every quantity, and the versions of all
/// programs that take part.
pub(crate) fn document(cases: &[Case], versions: &Versions) -> Value {
    cases.iter().map(|it| case(it, versions)).collect()
}

fn case(case: &Case, versions: &Versions) -> Value {
    json!({
        "programs": versions,
        "section": case.section,
        "case": case.name,
        "cpu_unit": case.work.cpu_unit(),
        "rate_unit": case.work.rate_unit(),
        "headline": case.headline.key(),
        "setups": case.rows.iter().map(row).collect::<Vec<_>>(),
    })
}

fn row(row: &Row) -> Value {
    let quantity = |column| {
        let (min, max) = row.range(column)?;
        Some(json!({ "median": row.median(column)?, "min": min, "max": max }))
    };
    let quantities: Map<String, Value> = Column::ALL
        .into_iter()
        .filter_map(|(column, key)| Some((key.to_owned(), quantity(column)?)))
        .collect();
    json!({
        "setup": row.setup,
        "rounds": row.rounds.len(),
        "failures": row.failures(),
        "quantities": quantities,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::compare::figures::example;

    #[test]
    fn documents_have_medians_and_ranges() {
        let versions = Versions::from([("haproxy".to_owned(), "3.2.1".to_owned())]);
        let document = document(&example(), &versions);
        assert_eq!(document[1]["programs"], json!({ "haproxy": "3.2.1" }));
        let gw = &document[0]["setups"][0];
        assert_eq!(
            (gw["setup"].as_str(), gw["rounds"].as_u64()),
            (Some("gw"), Some(3))
        );
        assert_eq!(
            gw["quantities"]["cpu"],
            json!({ "median": 10.0, "min": 6.0, "max": 20.0 })
        );
        assert!(gw["quantities"].get("p99_ms").is_none());
        assert_eq!(document[1]["setups"][0]["failures"], json!(2));
    }
}
