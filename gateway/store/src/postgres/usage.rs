//! Usage of services in PostgreSQL: each row is what one node has counted on one day so far. A node
//! writes its whole counts, so that a repetition counts nothing twice.

use tokio_postgres::Row;

use super::super::{StoreError, UsageAmounts, UsageQuery, UsageRow};
use super::connection::engine::{CALL, SqlSession};
use super::{PostgresStore, column};

/// Counts only grow, so that an earlier write that arrives late changes nothing.
const PUT: &str = "
    INSERT INTO gw.usage (source, date, label, requests, refusals, bytes_in, bytes_out)
    SELECT $1::text::uuid, date::date, label, requests, refusals, bytes_in, bytes_out
    FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[])
        AS new (date, label, requests, refusals, bytes_in, bytes_out)
    ON CONFLICT (date, label, source) DO UPDATE SET
        requests = greatest(usage.requests, excluded.requests),
        refusals = greatest(usage.refusals, excluded.refusals),
        bytes_in = greatest(usage.bytes_in, excluded.bytes_in),
        bytes_out = greatest(usage.bytes_out, excluded.bytes_out)";

const FORGET: &str = "DELETE FROM gw.usage WHERE date < $1::text::date";

const SELECT: &str = "
    SELECT date::text, label, sum(requests)::bigint, sum(refusals)::bigint,
        sum(bytes_in)::bigint, sum(bytes_out)::bigint
    FROM gw.usage
    WHERE date BETWEEN $1::text::date AND $2::text::date AND starts_with(label, $3)
        AND ($4::text IS NULL OR date < $4::text::date
            OR (date = $4::text::date AND label COLLATE \"C\" > $5))
    GROUP BY date, label ORDER BY date DESC, label COLLATE \"C\" LIMIT $6";

impl PostgresStore {
    pub(super) fn write_usage(
        &mut self,
        source: &str,
        rows: &[UsageRow],
        oldest: &str,
    ) -> Result<(), StoreError> {
        let dates: Vec<&str> = rows.iter().map(|row| row.date.as_str()).collect();
        let labels: Vec<&str> = rows.iter().map(|row| row.label.as_str()).collect();
        let counts: Vec<[i64; 4]> = rows.iter().map(|row| row.amounts.to_columns()).collect();
        let [requests, refusals, bytes_in, bytes_out] = [0, 1, 2, 3]
            .map(|column: usize| counts.iter().map(|row| row[column]).collect::<Vec<i64>>());
        self.checked()?
            .call(CALL * 2, async |session: &mut SqlSession| {
                let put = session.prepare(PUT).await?;
                let client = &session.client;
                client
                    .execute(
                        &put,
                        &[
                            &source, &dates, &labels, &requests, &refusals, &bytes_in, &bytes_out,
                        ],
                    )
                    .await?;
                client.execute(FORGET, &[&oldest]).await
            })?;
        Ok(())
    }

    pub(super) fn read_usage(&mut self, query: &UsageQuery) -> Result<Vec<UsageRow>, StoreError> {
        let (after_date, after_label) = query.after.clone().unzip();
        let limit = i64::try_from(query.limit).unwrap_or(i64::MAX);
        let rows = self
            .checked()?
            .call(CALL * 2, async |session: &mut SqlSession| {
                let select = session.prepare(SELECT).await?;
                session
                    .client
                    .query(
                        &select,
                        &[
                            &query.since,
                            &query.until,
                            &query.label_prefix,
                            &after_date,
                            &after_label,
                            &limit,
                        ],
                    )
                    .await
            })?;
        rows.iter().map(read).collect()
    }
}

fn read(row: &Row) -> Result<UsageRow, StoreError> {
    Ok(UsageRow {
        date: column(row, 0)?,
        label: column(row, 1)?,
        amounts: UsageAmounts::from_columns([
            column(row, 2)?,
            column(row, 3)?,
            column(row, 4)?,
            column(row, 5)?,
        ]),
    })
}
